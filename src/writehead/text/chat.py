"""Chats to prompts: the model's own template, rendered in a sandbox, and encoded so that messages stay text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from writehead.errors import PromptError, TokenizerError
from writehead.text import sandbox
from writehead.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_PRIVATE_USE = range(0xE000, 0xF900)


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The prompt text of `messages`, as `apply_chat_template` of transformers gives it.

    `variables` are further names that the template may read, such as `enable_thinking`. Errors: TokenizerError for a
    template that is broken, reaches for what the sandbox does not offer or does not come to an end; PromptError for
    messages that the template refuses.
    """
    _check_messages(messages)
    compiled = _compile(template)
    names = {key: value for key, value in (("bos_token", bos_token), ("eos_token", eos_token)) if value is not None}
    values = {
        **variables,
        **names,
        "messages": [dict(message) for message in messages],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return sandbox.render(compiled, values)
    except (jinja2.exceptions.SecurityError, jinja2.TemplateSyntaxError) as error:
        raise TokenizerError(f"The model's chat template is refused: {error}; use another template.") from error
    except jinja2.TemplateError as error:
        raise PromptError(f"The model's chat template does not take these messages: {error}.") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise TokenizerError(f"The model's chat template fails ({reason}); use another template.") from error


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    **variables: Any,
) -> list[int]:
    """The ids of a chat. Special tokens that the template writes become ids; what messages spell stays text.

    No bos is added: the template writes it where the model wants one. Errors: as `render_chat`; TokenizerError if the
    model has no template and none is given.
    """
    template = template or tokenizer.chat_template
    if template is None:
        raise TokenizerError("The model has no chat template; give one, or use plain completion.")
    _check_messages(messages)
    opening, closing = _markers([template, *_strings([messages, tools, variables])])

    def mark(value: Any) -> Any:
        return _mark(value, tokenizer.special_pattern, opening, closing)

    eos = min(tokenizer.eos_ids, default=None)
    text = render_chat(
        template,
        mark(list(messages)),
        add_generation_prompt=add_generation_prompt,
        bos_token=None if tokenizer.bos_id is None else tokenizer.spelling(tokenizer.bos_id),
        eos_token=None if eos is None else tokenizer.spelling(eos),
        tools=mark(None if tools is None else list(tools)),
        **mark(variables),
    )
    if opening not in text and closing not in text:
        return tokenizer.encode(text, add_special=False, allow_special=True)
    return list(_encode_marked(tokenizer, text, opening, closing))


def _encode_marked(tokenizer: Tokenizer, text: str, opening: str, closing: str) -> Iterator[int]:
    """Encode a rendering in which what messages spell is wrapped in markers; outside, special tokens are ids."""
    special = tokenizer.special_pattern.pattern
    split = re.compile(f"{opening}(?P<spelled>{special}){closing}|[{opening}{closing}]|(?P<special>{special})")
    run: list[str] = []
    at, first = 0, True
    for match in split.finditer(text):
        run.append(text[at : match.start()])
        at = match.end()
        token_id = None if match["special"] is None else tokenizer.id_of(match["special"])
        if token_id is None:
            run.append(match["spelled"] or "")
            continue
        yield from _encode_run(tokenizer, "".join(run), first)
        yield token_id
        run, first = [], False
    yield from _encode_run(tokenizer, "".join([*run, text[at:]]), first)


def _encode_run(tokenizer: Tokenizer, text: str, first: bool) -> list[int]:
    return tokenizer.encode(text, add_special=False, continuation=not (first or tokenizer.prefixes_after_special))


def _mark(value: Any, special: re.Pattern[str], opening: str, closing: str) -> Any:
    """`value` with every spelling of a special token in its strings wrapped in markers; keys are left alone."""
    if isinstance(value, str):
        return special.sub(lambda match: f"{opening}{match[0]}{closing}", value)
    if isinstance(value, Mapping):
        return {key: _mark(item, special, opening, closing) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(item, special, opening, closing) for item in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    """Every string in `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _markers(strings: Iterable[str]) -> tuple[str, str]:
    """Two private-use characters that do not occur in `strings`."""
    used = set().union(*strings)
    free = (char for code in _PRIVATE_USE if (char := chr(code)) not in used)
    try:
        return next(free), next(free)
    except StopIteration:
        raise PromptError("The messages use every private-use character of Unicode; leave some out.") from None


def _check_messages(messages: Sequence[Message]) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise PromptError("A chat needs a list of at least one message; each is an object with `role` and `content`.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(
                f"Message {index} of the chat has no `role`; each is an object with `role` and `content`."
            )


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    if len(template) > sandbox.MAX_TEMPLATE_CHARS:
        raise TokenizerError(
            f"The model's chat template has {len(template)} characters, at most {sandbox.MAX_TEMPLATE_CHARS} are read."
        )
    try:
        return sandbox.TemplateEnvironment().from_string(template)
    except Exception as error:
        raise TokenizerError(f"The model's chat template is not valid ({error}); use another template.") from error
