"""From what a user calls a prompt to a request that the engine can run, or one sentence that says why not."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from writehead.engine.request import Request, SamplingParams
from writehead.errors import PromptError, UsageError
from writehead.text import FimFormat, Tokenizer, fim_prompt

Prompt = str | Seq[int] | Mapping[str, Any]
"""Text, token ids (a list, or an array of one dimension), or a mapping: `prompt` with an optional `suffix` (fill in the
middle), or `prompt_token_ids`."""


class Intake:
    """Checks prompts and parameters against one model. It numbers the requests it makes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        fim: FimFormat | None,
        *,
        max_length: int,
        vocab_size: int,
        num_sampleable: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.tokenizer, self.fim, self.max_length = tokenizer, fim, max_length
        self.vocab_size, self.num_sampleable, self.stop_ids = vocab_size, num_sampleable, stop_ids
        self._ids = itertools.count()

    def request(self, prompt: Prompt, params: SamplingParams, *, where: str) -> Request:
        """A prompt as a request. Errors: PromptError and UsageError, which call the prompt `where`."""
        prompt_ids = self._encode(prompt, params, where)
        self._check(prompt_ids, params, where)
        own = frozenset[int]() if params.ignore_eos else self.stop_ids
        return Request(
            id=next(self._ids),
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_length=self.max_length,
            stop_ids=own | params.stop_ids,
        )

    def _check_text(self, text: str, params: SamplingParams, where: str) -> None:
        """Refuse text that no tokens could hold before seconds are spent on its tokens."""
        limit = self._longest_prompt(params)
        longest = self.tokenizer.max_token_bytes if len(text) > limit else None
        size = 0 if longest is None else len(text.encode("utf-8", "surrogatepass"))
        if longest is not None and size > limit * longest:
            raise PromptError(
                f"{where} has {size} bytes; the limit is {self.max_length} tokens for prompt and completion together, "
                f"and no token has more than {longest} bytes, so at most {limit * longest} fit: shorten it"
            )

    def _longest_prompt(self, params: SamplingParams) -> int:
        return self.max_length - (0 if params.max_tokens == 0 else 1)

    def _check(self, prompt_ids: list[int], params: SamplingParams, where: str) -> None:
        limit = self._longest_prompt(params)
        if not prompt_ids:
            raise PromptError(f"{where} is empty; give at least one token")
        if len(prompt_ids) > limit:
            raise PromptError(
                f"{where} has {len(prompt_ids)} tokens; the limit is {self.max_length} for prompt and completion "
                f"together, so at most {limit} fit: shorten it"
            )
        bad = next((i for i in prompt_ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise PromptError(f"{where} has the token id {bad}; the vocabulary has 0 to {self.vocab_size - 1}")
        for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_ids)):
            bad = next((i for i in ids if i >= self.num_sampleable), None)
            if bad is not None:
                raise UsageError(f"{name} has the token id {bad}; the tokenizer has 0 to {self.num_sampleable - 1}")

    def _encode(self, prompt: Prompt, params: SamplingParams, where: str) -> list[int]:
        if isinstance(prompt, str):
            return self._encode_text(prompt, None, params, where)
        if not isinstance(prompt, Mapping):
            return _as_ids(prompt, where)
        known = {"prompt", "suffix"} if "prompt" in prompt else {"prompt_token_ids"}
        if not prompt or not prompt.keys() <= known:
            raise PromptError(
                f"{where} is a mapping with {', '.join(map(repr, prompt)) or 'nothing'}; it takes 'prompt' with an "
                "optional 'suffix', or 'prompt_token_ids'"
            )
        if "prompt_token_ids" in prompt:
            return _as_ids(prompt["prompt_token_ids"], where)
        text, suffix = prompt["prompt"], prompt.get("suffix")
        if not isinstance(text, str) or not isinstance(suffix, str | None):
            raise PromptError(f"{where}: 'prompt' and 'suffix' must be text")
        return self._encode_text(text, suffix, params, where)

    def _encode_text(self, text: str, suffix: str | None, params: SamplingParams, where: str) -> list[int]:
        if suffix is not None and self.fim is None:
            raise PromptError(f"{where} has a suffix, but the model's vocabulary has no fill-in-the-middle tokens")
        if suffix is None:
            self._check_text(text, params, where)
        try:
            if suffix is None or self.fim is None:
                return self.tokenizer.encode(text)
            wanted = self.max_length if params.max_tokens is None else params.max_tokens
            room = self.max_length - min(wanted, self.max_length // 2)
            return fim_prompt(self.tokenizer, self.fim, text, suffix, max_tokens=room)
        except PromptError as error:
            raise PromptError(f"{where}: {error}") from error


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> dict[str, Prompt]:
    """One prompt, or several in their order, each under the name that errors call it by.

    A flat list of whole numbers is one prompt.
    """
    if isinstance(prompts, str | Mapping):
        return {"the prompt": prompts}
    listed = _listed(prompts)
    if listed is None:
        raise PromptError(f"the prompt is {prompts!r}; expected text, token ids, a mapping, or a list of these")
    if listed and all(_as_id(p) is not None for p in listed):
        return {"the prompt": listed}
    return {f"prompt {i}": prompt for i, prompt in enumerate(listed)}


def as_params(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts, from one for all, one for each, or none."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = list(params) if isinstance(params, Iterable) else [params]
    wrong = [p for p in listed if not isinstance(p, SamplingParams)]
    if wrong:
        raise UsageError(f"sampling_params has {wrong[0]!r}; expected SamplingParams, or a list of them")
    if len(listed) != count:
        raise UsageError(f"sampling_params has {len(listed)} entries for {count} prompts; give one, or one for each")
    return listed


def prompt_text(prompt: Prompt) -> str | None:
    """The text that the user gave; None for token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _as_ids(value: Any, where: str) -> list[int]:
    listed = _listed(value)
    ids = [i for item in listed or () if (i := _as_id(item)) is not None]
    if listed is None or len(ids) < len(listed):
        raise PromptError(f"{where} is neither text nor a list of token ids")
    return ids


def _listed(value: Any) -> list[Any] | None:
    """The items of a list, an array or anything else that has items; None for text, a mapping, or what has none."""
    if isinstance(value, str | bytes | Mapping):
        return None
    try:
        items = iter(value)
    except TypeError:
        return None
    return list(items)


def _as_id(value: Any) -> int | None:
    """A whole number of any library as an int; None for anything else, truth values included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
