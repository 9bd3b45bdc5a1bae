"""What every tokenizer format is read into, and the error translation that the readers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from writehead.errors import TokenizerError
from writehead.text.families import ALWAYS_CONTROL


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tokenizer as read, before it is wrapped.

    `prefix_ids` open every prompt that is encoded with special tokens. `unused_ids` are padding rows of the vocabulary.
    `fim_ids` are fill-in-the-middle ids that the file states outright, keyed prefix, suffix, middle, pad, rep, sep.
    """

    origin: str
    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    pad_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    unused_ids: frozenset[int] = frozenset()
    fim_ids: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def refusing(origin: str, what: str) -> Iterator[None]:
    """Turn whatever `tokenizers` raises, Rust panics included, into a TokenizerError that names the file."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise TokenizerError(f"{origin}: {what} ({reason}); fetch the file again.") from error
        raise


def mark_special(backend: tokenizers.Tokenizer, spellings: Iterable[str | None]) -> None:
    """Register as special what is in the vocabulary and is a control token, but was not declared so. Mutates `backend`.

    SantaCoder's and Qwen's sentinels are plain entries in their files; left so, text that spells one would become it.
    """
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = sorted(
        spelling
        for spelling in {*ALWAYS_CONTROL, *spellings} - special
        if spelling and backend.token_to_id(spelling) is not None
    )
    backend.add_special_tokens([tokenizers.AddedToken(s, normalized=False, special=True) for s in missing])
