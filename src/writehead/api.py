"""The short doors: `LLM` to generate, `load` to get the decoder itself."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from writehead import kernels as kernel_backends
from writehead.build import build, choose_dtype, load_tokenizer, open_source
from writehead.cache import KVCache
from writehead.engine.engine import Engine, Event
from writehead.engine.outputs import RequestOutput, make_output
from writehead.engine.request import Request, SamplingParams
from writehead.engine.sequence import Sequence
from writehead.errors import PromptError, UsageError
from writehead.models.decoder import Decoder
from writehead.text import detect_fim, encode_chat, fim_prompt, stop_ids

Prompt = str | Seq[int] | Mapping[str, Any]
"""Text, token ids, or a mapping: `prompt` with an optional `suffix` (fill in the middle), or `prompt_token_ids`."""

Message = Mapping[str, Any]


def load(
    model: str | Path | None = None,
    *,
    weights: str = "auto",
    kernels: str = "auto",
    accept_config_keys: Collection[str] = (),
) -> Decoder:
    """The decoder of a checkpoint as a torch module: token ids [B, T] -> logits [B, T, V]."""
    source = open_source(model, accept_config_keys=accept_config_keys)
    return build(source, dtype=choose_dtype(weights), kernels=kernel_backends.load(kernels))


class LLM:
    """A model, its tokenizer and an engine, for offline use.

    `model` is a directory or file of a checkpoint, a Hub id (`org/name`, `org/name@revision`), or None for the model
    in the box. `weights` is auto, fp32, bf16 or fp16. `max_model_len` bounds prompt and completion together (default:
    the model's positions), `max_num_seqs` the sequences that run at once, and `max_step_tokens` the tokens of one
    forward pass, so that a long prompt is read in chunks.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        weights: str = "auto",
        kernels: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_step_tokens: int = 2048,
        accept_config_keys: Collection[str] = (),
    ) -> None:
        _positive("max_num_seqs", max_num_seqs)
        if max_step_tokens < max_num_seqs:
            raise UsageError(f"max_step_tokens is {max_step_tokens}; it must be at least max_num_seqs, {max_num_seqs}")
        source = open_source(model, accept_config_keys=accept_config_keys)
        self.config = source.config
        self.max_model_len = _model_length(max_model_len, source.config.max_positions)
        self.tokenizer = load_tokenizer(source)
        self.fim = detect_fim(self.tokenizer)
        dtype = choose_dtype(weights)
        row_bytes = source.config.cache_values_per_token() * dtype.itemsize * self.max_model_len
        cache = KVCache(
            num_layers=source.config.num_layers,
            num_kv_heads=source.config.num_kv_heads,
            head_dim=source.config.head_dim,
            num_rows=_num_rows(row_bytes, max_num_seqs, self.max_model_len),
            capacity=self.max_model_len,
            dtype=dtype,
        )
        decoder = build(source, dtype=dtype, kernels=kernel_backends.load(kernels))
        self.engine = Engine(decoder, self.tokenizer, cache, max_step_tokens=max_step_tokens)
        self._stop_ids = stop_ids(self.tokenizer, self.fim) | frozenset(source.config.eos_ids)
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in order. All prompts are checked before any is run; `on_event` sees each token as it comes."""
        listed = _as_list(prompts)
        params = _as_params(sampling_params, len(listed))
        requests = [self._request(p, q, f"prompt {i}") for i, (p, q) in enumerate(zip(listed, params, strict=True))]
        sequences = [self.engine.add(request) for request in requests]
        try:
            self._drain(on_event)
        finally:
            self._cancel(itertools.chain.from_iterable(sequences))
        return [make_output(_prompt_text(p), s, self._echo_text(s[0])) for p, s in zip(listed, sequences, strict=True)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Event]:
        """The events of one prompt as they come; their texts join to the completion. Closing the iterator cancels."""
        request = self._request(prompt, sampling_params or SamplingParams(), "the prompt")
        sequences = self.engine.add(request)
        try:
            while any(s.finish_reason is None for s in sequences):
                yield from (event for event in self.engine.step() if event.request_id == request.id)
        finally:
            self._cancel(sequences)

    def chat(
        self, messages: Seq[Message] | Seq[Seq[Message]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the checkpoint's own chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if several else [messages]
        ids = [self.encode_chat(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate([{"prompt_token_ids": i} for i in ids], sampling_params)

    def encode_chat(self, messages: Seq[Message]) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer."""
        return encode_chat(self.tokenizer, messages)

    def _drain(self, on_event: Callable[[Event], None] | None) -> None:
        while True:
            events = self.engine.step()
            if on_event is not None:
                for event in events:
                    on_event(event)
            scheduler = self.engine.scheduler
            if not scheduler.running and not scheduler.waiting:
                return

    def _cancel(self, sequences: Iterator[Sequence] | Seq[Sequence]) -> None:
        for sequence in sequences:
            self.engine.cancel(sequence)

    def _request(self, prompt: Prompt, params: SamplingParams, where: str) -> Request:
        ids = self._encode(prompt, params, where)
        room = 0 if params.max_tokens == 0 else 1
        if not ids:
            raise PromptError(f"{where} is empty; give at least one token")
        if len(ids) + room > self.max_model_len:
            raise PromptError(
                f"{where} has {len(ids)} tokens; the model's limit is {self.max_model_len} for prompt and completion "
                f"together, so at most {self.max_model_len - room} fit: shorten it"
            )
        bad = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if bad:
            raise PromptError(
                f"{where} has the token id {bad[0]}; the vocabulary has 0 to {self.config.vocab_size - 1}"
            )
        self._check_ids(params)
        own = frozenset() if params.ignore_eos else self._stop_ids
        return Request(
            id=next(self._request_ids),
            prompt_ids=tuple(ids),
            params=params,
            max_length=self.max_model_len,
            stop_ids=own | frozenset(params.stop_token_ids or ()),
        )

    def _check_ids(self, params: SamplingParams) -> None:
        for name, ids in (("logit_bias", params.logit_bias or {}), ("stop_token_ids", params.stop_token_ids or ())):
            for token in ids:
                if token >= self.engine.num_sampleable:
                    raise UsageError(
                        f"{name} has the token id {token}; the vocabulary has {self.engine.num_sampleable}"
                    )

    def _encode(self, prompt: Prompt, params: SamplingParams, where: str) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping):
            return _as_ids(prompt, where)
        unknown = sorted(set(prompt) - {"prompt", "suffix", "prompt_token_ids"})
        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise PromptError(
                f"{where} is a mapping; it takes 'prompt' with an optional 'suffix', or 'prompt_token_ids'"
            )
        if "prompt_token_ids" in prompt:
            return _as_ids(prompt["prompt_token_ids"], where)
        prefix, suffix = prompt["prompt"], prompt.get("suffix")
        if not isinstance(prefix, str) or not isinstance(suffix, str | None):
            raise PromptError(f"{where}: 'prompt' and 'suffix' must be text")
        if suffix is None:
            return self.tokenizer.encode(prefix)
        if self.fim is None:
            raise PromptError(f"{where} has a suffix, but the model's vocabulary has no fill-in-the-middle tokens")
        room = self.max_model_len - (params.max_tokens if params.max_tokens is not None else 1)
        return fim_prompt(self.tokenizer, self.fim, prefix, suffix, max_tokens=max(room, self.max_model_len // 2))

    def _echo_text(self, sequence: Sequence) -> str:
        if not sequence.request.params.echo:
            return ""
        return self.tokenizer.decode(list(sequence.request.prompt_ids), skip_special=True)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(p, int) for p in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _as_params(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UsageError(f"sampling_params has {len(params)} entries for {count} prompts; give one, or one for each")
    return list(params)


def _as_ids(value: Any, where: str) -> list[int]:
    if isinstance(value, Seq) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return list(value)
    raise PromptError(f"{where} is neither text nor a list of token ids")


def _prompt_text(prompt: Prompt) -> str | None:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt", ())
    return prompt if isinstance(prompt, str) else None


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; expected a whole number from 1")


def _model_length(wanted: int | None, limit: int) -> int:
    if wanted is None:
        return limit
    _positive("max_model_len", wanted)
    if wanted > limit:
        raise UsageError(f"max_model_len is {wanted}, but the model has only {limit} positions")
    return wanted


def _num_rows(row_bytes: int, max_num_seqs: int, max_model_len: int) -> int:
    """How many sequences the cache may hold: it may grow to half of the machine's memory."""
    budget = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if row_bytes > budget:
        raise UsageError(
            f"one sequence of {max_model_len} tokens needs a cache of {row_bytes / 2**30:.1f} GiB, more than half of "
            f"the memory ({budget / 2**30:.1f} GiB); set max_model_len to at most {max_model_len * budget // row_bytes}"
        )
    return min(max_num_seqs, budget // row_bytes)
