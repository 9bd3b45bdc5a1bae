"""The short doors: `LLM` to generate, `load` to get the decoder itself."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from writehead import kernels as kernel_backends
from writehead.build import (
    build,
    cache_bytes_per_token,
    free_memory,
    load_tokenizer,
    make_cache,
    num_weight_bytes,
    open_source,
    weight_format,
)
from writehead.engine.engine import Engine, Event
from writehead.engine.intake import Intake, Prompt, as_params, as_prompts, prompt_text
from writehead.engine.outputs import RequestOutput, echo_text, make_output
from writehead.engine.request import Request, SamplingParams
from writehead.engine.sequence import Sequence
from writehead.errors import UsageError
from writehead.kernels import cache_dtype, parse_format
from writehead.models.config import ModelConfig
from writehead.models.decoder import Decoder
from writehead.text import detect_fim, stop_ids

Message = Mapping[str, Any]


def load(
    model: str | Path | None = None,
    *,
    weights: str = "auto",
    kernels: str = "auto",
    accept_config_keys: Collection[str] = (),
) -> Decoder:
    """The decoder of a checkpoint as a torch module: token ids [B, T] -> logits [B, T, V].

    Weights of floats are parameters, as torch has them, unless `kernels` is cpu.
    """
    source = open_source(model, accept_config_keys=accept_config_keys)
    packed = source.packed is not None or parse_format(weights, packs_floats=False).packed
    return build(source, weights=weights, kernels=kernel_backends.load(kernels, packed=packed))


class LLM:
    """A model, its tokenizer and an engine, for offline use from one thread.

    `model` is a directory or file of a checkpoint, a Hub id (`org/name`, `org/name@revision`), or None for the model
    in the box. `weights` is auto (fp32), fp32, bf16, fp16, int8 or int4. `kv_cache_dtype` is auto (as 16-bit weights,
    fp32 for fp32, else bf16), fp32, bf16, fp16 or int8. `max_model_len` bounds prompt and completion together (default:
    the model's positions), `max_num_seqs` the sequences that run at once; both defaults shrink so that the cache stays
    within half of the memory and what the weights leave free. `max_step_tokens` bounds one forward pass, so that a long
    prompt is read in chunks (default: 512, or max_num_seqs if that is more).
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        weights: str = "auto",
        kernels: str = "auto",
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_step_tokens: int | None = None,
        accept_config_keys: Collection[str] = (),
    ) -> None:
        _positive("max_num_seqs", max_num_seqs)
        if max_step_tokens is not None:
            _positive("max_step_tokens", max_step_tokens)
        if max_step_tokens is not None and max_step_tokens < max_num_seqs:
            raise UsageError(
                f"max_step_tokens is {max_step_tokens}, less than max_num_seqs, {max_num_seqs}; a step advances every "
                "sequence by at least one token, so raise the first or lower the second"
            )
        source = open_source(model, accept_config_keys=accept_config_keys)
        self.config = source.config
        backend = kernel_backends.load(kernels)
        format = weight_format(source, weights, backend)
        dtype, budget = cache_dtype(kv_cache_dtype, format), _cache_budget(num_weight_bytes(source, format))
        self.max_model_len = _model_length(max_model_len, source.config, dtype, budget)
        row_bytes = cache_bytes_per_token(source.config, dtype) * self.max_model_len
        num_rows = max(1, min(max_num_seqs, budget // row_bytes))  # as many as may run at once within the budget
        cache = make_cache(source.config, num_rows=num_rows, capacity=self.max_model_len, dtype=dtype)
        with ThreadPoolExecutor(1) as pool:  # the tokenizer is parsed while the weights stream in
            tokenizer = pool.submit(load_tokenizer, source)
            decoder = build(
                source, weights=weights, kernels=backend, cache_bytes=row_bytes,
                proceed=lambda: tokenizer.done() and tokenizer.result(),  # if it cannot be used, say so at once
            )  # fmt: skip
            self.tokenizer = tokenizer.result()
        self.engine = Engine(decoder, self.tokenizer, cache, max_step_tokens=max_step_tokens)
        self.fim = detect_fim(self.tokenizer, num_rows=source.config.vocab_size)
        self._intake = Intake(
            self.tokenizer,
            self.fim,
            max_length=self.max_model_len,
            vocab_size=source.config.vocab_size,
            num_sampleable=self.engine.num_sampleable,
            stop_ids=stop_ids(self.tokenizer, self.fim) | frozenset(source.config.eos_ids),
        )
        self._events: dict[int, deque[Event]] = {}
        """What came out for each open request and was not handed over yet: whoever drives the engine fills them all."""

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in order; all are checked before any is run.

        `use_tqdm` (vLLM's name) shows a progress bar on stderr. `on_event` sees each token as it comes; what it raises
        ends the call, and the requests with it.
        """
        named = as_prompts(prompts)
        params = as_params(sampling_params, len(named))
        requests = [self._intake.request(p, q, where=w) for (w, p), q in zip(named.items(), params, strict=True)]
        ended: dict[tuple[int, int], Sequence] = {}
        total = sum(request.params.n for request in requests)
        with closing(self._run(requests)) as events, _progress(total, show=use_tqdm) as advance:
            for event in events:
                if on_event is not None:
                    on_event(event)
                if event.finish_reason is not None:
                    ended[event.request_id, event.index] = event.sequence
                    advance()
        return [
            make_output(prompt_text(p), [ended[r.id, i] for i in range(r.params.n)], echo_text(r, self.tokenizer))
            for p, r in zip(named.values(), requests, strict=True)
        ]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[Event]:
        """The events of one prompt as they come; their texts join to the completion.

        Closing the iterator, or dropping it, cancels. Any number may be open at once, and `generate` between them.
        """
        (params,) = as_params(sampling_params, 1)
        return self._run([self._intake.request(prompt, params, where="the prompt")])

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the checkpoint's own chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if several else [messages]
        prompts = [{"prompt_token_ids": self.encode_chat(c)} for c in conversations]  # type: ignore[arg-type]
        return self.generate(prompts if several else prompts[0], sampling_params, use_tqdm=use_tqdm)

    def encode_chat(self, messages: Seq[Message]) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer."""
        from writehead.text.chat import encode_chat

        return encode_chat(self.tokenizer, messages)

    def _run(self, requests: list[Request]) -> Generator[Event]:
        """Drive the engine until these requests have ended, handing over their events; on exit, cancel the rest."""
        mine: deque[Event] = deque()
        sequences: list[Sequence] = []
        try:
            for request in requests:
                self._events[request.id] = mine
                sequences += self.engine.add(request)
            unfinished = deque(sequences)
            while True:
                while mine:
                    yield mine.popleft()
                while unfinished and unfinished[0].finish_reason is not None:
                    unfinished.popleft()
                if not unfinished:
                    return
                for event in self.engine.step():
                    if event.request_id in self._events:
                        self._events[event.request_id].append(event)
                    else:  # an interrupt came between its start and the `try` above: nobody waits for it
                        self.engine.cancel(event.sequence)
        finally:
            for sequence in sequences:
                self.engine.cancel(sequence)
            for request in requests:
                self._events.pop(request.id, None)


@contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, or none -> what to call when one of `total` completions has ended."""
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("completions", total=total)
        yield lambda: bar.advance(task)


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} is {value!r}; expected a whole number from 1")


def _model_length(wanted: int | None, config: ModelConfig, dtype: torch.dtype, budget: int) -> int:
    """Tokens of prompt and completion: as asked, or the model's positions as far as the cache of one sequence fits.

    A default is at least a sixteenth of the positions; where that does not fit, the model is not worth its weights.
    """
    token_bytes = cache_bytes_per_token(config, dtype)
    fitting = budget // token_bytes
    if wanted is None:
        return max(-(-config.max_positions // 16), min(config.max_positions, fitting))
    _positive("max_model_len", wanted)
    if wanted > config.max_positions:
        raise UsageError(
            f"max_model_len is {wanted}, but the model has only {config.max_positions} positions; ask for at most that"
        )
    if wanted > fitting > 0:
        raise UsageError(
            f"one sequence of {wanted} tokens needs a cache of {wanted * token_bytes / 2**30:.1f} GiB, but beside the "
            f"weights it may take {budget / 2**30:.1f} GiB; set max_model_len to at most {fitting}"
        )
    return wanted


def _cache_budget(weight_bytes: int) -> int:
    """Bytes that the cache may take: half of the machine's memory, or what the weights leave of what is free."""
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min(half, free_memory() - weight_bytes))
