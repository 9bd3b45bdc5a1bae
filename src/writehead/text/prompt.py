"""Fill-in-the-middle prompts and the tokens that end a completion.

Prompts are put together from ids. The code around the cursor is encoded as text, so a file that spells a sentinel does
not become one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from writehead.errors import PromptError, UsageError
from writehead.text.families import END_TOKENS, FILE_SEPARATORS, FIM_FAMILIES, FimFamily, FimMode
from writehead.text.tokenizer import Tokenizer

_WORD_END = re.compile(r"(?<=[A-Za-z])[ \t\r\n]")

_PREFIX_SHARE = 0.75  # what is left of the cursor says more about what comes next than what is right of it


@dataclass(frozen=True, slots=True, kw_only=True)
class FimFormat:
    """How one checkpoint is asked to fill in the middle, in ids.

    `middle_id` is None where the prompt ends with the prefix. `stop_ids` end a completion: a sentinel, padding, the
    next file. `bos`: the prompt opens with what the tokenizer puts in front of any prompt.
    """

    name: str
    prefix_id: int
    suffix_id: int
    middle_id: int | None
    modes: tuple[FimMode, ...]
    stop_ids: frozenset[int]
    bos: bool = True

    @property
    def default_mode(self) -> FimMode:
        return self.modes[0]


def detect_fim(tokenizer: Tokenizer, *, num_rows: int | None = None) -> FimFormat | None:
    """The format that the vocabulary's sentinels belong to; None if there is none, or the model lacks their rows.

    Ids that a GGUF file states come first. Having the sentinels does not prove that a model was trained on them.
    """
    found = _stated(tokenizer) or _spelled(tokenizer)
    if found is None or num_rows is None:
        return found
    return found if max(found.prefix_id, found.suffix_id, found.middle_id or 0) < num_rows else None


def _spelled(tokenizer: Tokenizer) -> FimFormat | None:
    for family in FIM_FAMILIES:
        wanted = (*family.sentinels, *((family.also,) if family.also else ()))
        if all(_control(tokenizer, spelling) is not None for spelling in wanted):
            prefix, suffix, *middle = (i for s in family.sentinels if (i := _control(tokenizer, s)) is not None)
            return _format(tokenizer, family, prefix, suffix, middle[0] if middle else None)
    return None


def fim_prompt(
    tokenizer: Tokenizer, fmt: FimFormat, prefix: str, suffix: str, *, mode: FimMode | None = None, max_tokens: int
) -> list[int]:
    """Ids of a prompt that asks for what stands between `prefix` and `suffix`, at most `max_tokens` of them.

    psm: <prefix> P <suffix> S <middle>; spm: <prefix> <suffix> S <middle> P (without a middle: <suffix> S <prefix> P).
    What does not fit is cut on the left of P and the right of S; the sentinels stay. P gets three quarters of the room,
    and each side what the other leaves. Errors: UsageError for a mode that the format lacks, PromptError if
    `max_tokens` does not even hold the sentinels.
    """
    mode = mode or fmt.default_mode
    if mode not in fmt.modes:
        raise UsageError(f"The {fmt.name} format has no {mode!r} order; use {' or '.join(map(repr, fmt.modes))}.")
    bos = tokenizer.encode("") if fmt.bos else []
    room = max_tokens - len(bos) - (2 if fmt.middle_id is None else 3)
    if room < 0:
        raise PromptError(
            f"{max_tokens} tokens cannot hold the markers of a fill-in-the-middle prompt; allow {max_tokens - room}."
        )
    left, right = _last_ids(tokenizer, prefix, room), _first_ids(tokenizer, suffix, room)
    num_left, num_right = _split_room(len(left), len(right), room)
    left, right = left[len(left) - num_left :], right[:num_right]
    if fmt.middle_id is None:
        return [*bos, fmt.suffix_id, *right, fmt.prefix_id, *left]
    if mode == "spm":
        return [*bos, fmt.prefix_id, fmt.suffix_id, *right, fmt.middle_id, *left]
    return [*bos, fmt.prefix_id, *left, fmt.suffix_id, *right, fmt.middle_id]


def stop_ids(tokenizer: Tokenizer, fmt: FimFormat | None = None) -> frozenset[int]:
    """The ids that end a completion: what the checkpoint states, what its family ends turns and files with, and with
    `fmt` its sentinels, padding and separators."""
    spelled = _found(tokenizer, (*END_TOKENS, *FILE_SEPARATORS))
    return tokenizer.eos_ids | spelled | (fmt.stop_ids if fmt else frozenset())


def _stated(tokenizer: Tokenizer) -> FimFormat | None:
    ids = tokenizer.fim_ids
    if not {"prefix", "suffix", "middle"} <= ids.keys():
        return None
    spelling = tokenizer.spelling(ids["prefix"])
    fallback = FimFamily(name="gguf", prefix="", suffix="", middle="", modes=("psm", "spm"))
    family = next(
        (
            f
            for f in FIM_FAMILIES
            if f.prefix == spelling and (f.also is None or _control(tokenizer, f.also) is not None)
        ),
        fallback,
    )
    return _format(tokenizer, family, ids["prefix"], ids["suffix"], ids["middle"])


def _format(tokenizer: Tokenizer, family: FimFamily, prefix: int, suffix: int, middle: int | None) -> FimFormat:
    stated = {tokenizer.fim_ids[part] for part in ("pad", "rep", "sep") if part in tokenizer.fim_ids}
    sentinels = {prefix, suffix} | (set() if middle is None else {middle})
    return FimFormat(
        name=family.name,
        prefix_id=prefix,
        suffix_id=suffix,
        middle_id=middle,
        modes=family.modes,
        stop_ids=frozenset(sentinels | stated | _found(tokenizer, family.stops)),
        bos=family.bos,
    )


def _last_ids(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The ids of `text`, or at least the last `count` of them, without encoding what is far from its end."""
    for size in _sizes(tokenizer, text, count):
        cut = _WORD_END.search(text, len(text) - size)
        if cut and len(ids := tokenizer.encode(text[cut.start() :], add_special=False)) >= count:
            return ids
    return tokenizer.encode(text, add_special=False)


def _first_ids(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The same from the start, of a text that continues another."""
    for size in _sizes(tokenizer, text, count):
        cut = _WORD_END.search(text, size)
        end = cut.start() if cut else len(text)
        if len(ids := tokenizer.encode(text[:end], add_special=False, continuation=True)) >= count:
            return ids
    return tokenizer.encode(text, add_special=False, continuation=True)


def _sizes(tokenizer: Tokenizer, text: str, count: int) -> Iterator[int]:
    """How many characters to try, while they are fewer than all. Where a cut could change an id: none."""
    size = 8 * count + 64
    if size < len(text) and tokenizer.splits_words and not tokenizer.special_pattern.search(text) and _is_valid(text):
        while size < len(text):
            yield size
            size *= 4


def _is_valid(text: str) -> bool:
    try:
        return bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False


def _split_room(num_left: int, num_right: int, room: int) -> tuple[int, int]:
    right = min(num_right, room - min(num_left, int(room * _PREFIX_SHARE)))
    return min(num_left, room - right), right


def _control(tokenizer: Tokenizer, spelling: str) -> int | None:
    """The id of a token if it is a control token: words such as `<EOT>` may also be ordinary pieces of a vocabulary."""
    token_id = tokenizer.id_of(spelling)
    return token_id if token_id in tokenizer.special_ids else None


def _found(tokenizer: Tokenizer, spellings: Iterable[str]) -> frozenset[int]:
    return frozenset(i for spelling in spellings if (i := _control(tokenizer, spelling)) is not None)
