"""`writehead chat`: a conversation in the terminal, or with a script through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from writehead.cli import INTERRUPTED, options, sampling
from writehead.engine.request import SamplingParams
from writehead.errors import PromptError, TokenizerError

if TYPE_CHECKING:
    from writehead.api import LLM


@options.with_fields(SamplingParams, sampling.ONE_ANSWER, defaults={**sampling.DEFAULTS, "max_tokens": 512})
def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    weights: options.Weights = "auto",
    kernels: options.Kernels = "auto",
    kv_cache_dtype: options.CacheDtype = "auto",
    max_model_len: options.MaxModelLen = None,
    accept_config_key: options.AcceptConfigKey = None,
    **fields: Any,
) -> None:
    """Talk to a model that was tuned for it.

    A line is a message, typed or piped; /reset forgets the conversation, /exit ends it, Ctrl-C stops an answer.
    """
    params = sampling.read_params(fields)
    from writehead.api import LLM
    from writehead.build import load_tokenizer, open_source

    accepted = accept_config_key or ()
    if load_tokenizer(open_source(model, accept_config_keys=accepted)).chat_template is None:
        raise TokenizerError(
            f"{model or 'the model in the box'} has no chat template, so it was not tuned for conversation; "
            "complete code with `writehead generate`, or choose a model of the instruct kind"
        )
    llm = LLM(
        model, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len,
        max_num_seqs=1, accept_config_keys=accepted,
    )  # fmt: skip
    opening = [] if system is None else [{"role": "system", "content": system}]
    try:
        _converse(llm, opening, params)
    except KeyboardInterrupt:
        print()
        raise typer.Exit(INTERRUPTED) from None


def _converse(llm: LLM, opening: list[dict[str, str]], params: SamplingParams) -> None:
    """Answer line after line. A message that does not fit is dropped where a person can react, else it is an error."""
    history = list(opening)
    for line in _lines():
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                history = list(opening)
                continue
        message = {"role": "user", "content": line}
        try:
            answer = _answer(llm, [*history, message], params)
        except PromptError as error:
            if not sys.stdin.isatty():
                raise
            print(f"error: {error} (/reset forgets the conversation)", file=sys.stderr)
            continue
        history += [message, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer as it comes; Ctrl-C keeps what there is, where a person can go on."""
    text = ""
    prompt = {"prompt_token_ids": llm.encode_chat(messages)}
    try:
        for event in llm.stream(prompt, params):
            print(event.text, end="", flush=True)
            text += event.text
            sampling.check_end(event.sequence)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    print(flush=True)
    return text


def _lines() -> Iterator[str]:
    """What the user types, or what comes through the pipe, line by line."""
    if not sys.stdin.isatty():
        for data in sys.stdin.buffer:
            yield options.decode(data, "stdin").rstrip("\r\n")
        return
    import readline  # noqa: F401 - gives input() history and editing

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
