"""The tokenizer: text to ids, ids to bytes.

Text never becomes a control token unless the caller allows it: a file that contains `<fim_prefix>` is a file about
fill-in-the-middle, not an instruction to the model. Decoding is done on bytes, so it neither cleans up spaces nor
depends on how many tokens come at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from writehead.errors import PromptError, TokenizerError
from writehead.text.files import read_directory
from writehead.text.gguf import read_gguf
from writehead.text.sentencepiece import SPACE
from writehead.text.source import Source

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of the byte-level alphabet (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()

_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}

_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
"""Pre-tokenizers that drop nothing, unless their behavior is to."""

_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


class Tokenizer:
    """A byte-level BPE or SentencePiece vocabulary. Immutable after construction and safe to share between threads."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._backend = source.backend
        self._backend.encode_special_tokens = True  # text that spells a special token is text
        self._variants: dict[tuple[bool, bool], tokenizers.Tokenizer] = {(False, False): self._backend}
        self._added = self._backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        decoder, pre_tokenizer = _kinds(self._backend.decoder), _kinds(self._backend.pre_tokenizer)
        self._byte_level = "ByteLevel" in decoder or (not decoder and "ByteLevel" in pre_tokenizer)
        self._byte_fallback = "ByteFallback" in decoder
        if not self._byte_level and not {"Metaspace", "ByteFallback", "Replace"} & decoder.keys():
            raise TokenizerError(
                f"{source.origin}: the vocabulary is neither byte-level nor SentencePiece (decoder: "
                f"{', '.join(decoder) or 'none'}), so its tokens cannot be turned into bytes; use another checkpoint."
            )
        normalizer = _kinds(self._backend.normalizer)
        metaspace = pre_tokenizer.get("Metaspace", {}).get("prepend_scheme")
        self._prefix_everywhere = "Prepend" in normalizer or metaspace == "always"
        self._prefix_somewhere = self._prefix_everywhere or metaspace == "first" or _adds_prefix(pre_tokenizer)
        self._strips_space = (
            "Strip" in decoder or decoder.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
        )
        self.bos_id: int | None = source.bos_id
        self.eos_ids: frozenset[int] = source.eos_ids
        self.pad_id: int | None = source.pad_id
        self.chat_template: str | None = source.chat_template
        self.add_bos: bool = bool(source.prefix_ids)
        self.special_ids: frozenset[int] = frozenset(i for i, token in self._added.items() if token.special)
        self.fim_ids: Mapping[str, int] = source.fim_ids
        self.splits_words: bool = (
            pre_tokenizer.keys() <= {"ByteLevel", "Digits"}
            and bool(pre_tokenizer.get("ByteLevel", {}).get("use_regex"))
            and not (normalizer or self._prefix_somewhere or self._added.keys() - self.special_ids)
        )
        """Whether text splits between a letter and a space as GPT-2's does: each side has the ids that it has alone."""

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer files of a checkpoint directory. Errors: TokenizerError naming the file."""
        return cls(read_directory(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, origin: str = "GGUF metadata") -> Tokenizer:
        """Build the tokenizer that GGUF `metadata` (plain Python values) describes; errors name `origin`."""
        return cls(read_gguf(metadata, origin=origin))

    @classmethod
    def stand_in(cls, vocab_size: int) -> Tokenizer:
        """A vocabulary that spells every id (`<17>`), for weights that come without a tokenizer."""
        backend = tokenizers.Tokenizer(models.BPE({f"<{i}>": i for i in range(vocab_size)}, []))
        backend.decoder = decoders.ByteLevel()
        return cls(Source(origin="no tokenizer", backend=backend))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. A model may have more rows than this: they are padding."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def base_vocab_size(self) -> int:
        """The same without tokens that were added later: what a model must have rows for."""
        return max(self._backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1

    @cached_property
    def max_token_bytes(self) -> int | None:
        """UTF-8 bytes of text that one token stands for at most; None where no number is certain.

        A normalizer may shrink text, a pre-tokenizer drop some, and an unknown or greedy token stand for any run of it.
        """
        model, normalizers = self._backend.model, _parts(self._backend.normalizer)
        splits = _parts(self._backend.pre_tokenizer)
        greedy = any(t.lstrip or t.rstrip for t in self._added.values() if not t.special)
        if (
            greedy
            or not isinstance(model, models.BPE)
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
            or any(p["type"] not in _KEEPING or p.get("behavior") == "Removed" for p in splits)
            or any(p["type"] != "Prepend" and p != _SPACES for p in normalizers)
        ):
            return None
        vocab = self._backend.get_vocab(with_added_tokens=True)
        if self._byte_level and vocab.keys() >= _ALPHABET.keys():
            own = max(map(len, self._backend.get_vocab(with_added_tokens=False)))
            return max(own, *(len(token.content.encode("utf-8")) for token in self._added.values()), 1)
        if self._byte_fallback and model.byte_fallback and vocab.keys() >= _BYTE_TOKENS:
            return max(len(token.encode("utf-8")) for token in vocab)
        return None

    def id_of(self, token: str) -> int | None:
        """The id of a token, spelled as in the vocabulary."""
        return self._backend.token_to_id(token)

    def spelling(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None beyond the vocabulary."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def encode(
        self, text: str, *, add_special: bool = True, allow_special: bool = False, continuation: bool = False
    ) -> list[int]:
        """The ids of `text`.

        `add_special` puts in front what the tokenizer opens a prompt with (bos, for most). `allow_special` turns text
        that spells a special token into its id: for templates, never for what a user typed. `continuation` leaves out
        the space that SentencePiece puts before the first word. Errors: PromptError for text that is not valid Unicode.
        """
        ids = self._ids(text, allow_special, continuation)
        if not allow_special and not self.special_ids.isdisjoint(ids):
            ids = self._ids_apart(text, ids, continuation)
        return [*self._source.prefix_ids, *ids] if add_special else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """The text of `ids`; invalid UTF-8 gives U+FFFD. `continuation`: text came before, so keep a leading space."""
        skipped = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in skipped)
        if not continuation and self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that one token stands for; nothing for padding rows and ids beyond the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._spell(token_id)
        return data

    @property
    def strips_leading_space(self) -> bool:
        """Whether a whole text loses one leading space when decoded (SentencePiece's dummy prefix)."""
        return self._strips_space

    @property
    def prefixes_after_special(self) -> bool:
        """Whether text after a special token gets SentencePiece's space in front, as text at the start does."""
        return self._prefix_everywhere

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches the spelling of any special token, the longest first."""
        spellings = sorted((self._added[i].content for i in self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or "(?!)")

    def _spell(self, token_id: int) -> bytes:
        token = self.spelling(token_id)
        if token is None or token_id in self._source.unused_ids:
            return b""
        if self._byte_level:
            if token_id not in self._added and all(char in _ALPHABET for char in token):
                return bytes(_ALPHABET[char] for char in token)
            return token.encode("utf-8")
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace(SPACE, " ").encode("utf-8")

    def _ids(self, text: str, allow_special: bool, continuation: bool) -> list[int]:
        backend = self._variant(allow_special, continuation and self._prefix_somewhere)
        try:
            return backend.encode(text, add_special_tokens=False).ids
        except (UnicodeError, TypeError) as error:
            raise PromptError(f"The text cannot be tokenized ({error}): it must be valid Unicode text.") from error

    def _ids_apart(self, text: str, ids: list[int], continuation: bool) -> list[int]:
        """Encode where special tokens are also ordinary pieces: cut inside each spelling, so that none can form."""
        cuts = [match.start() + 1 for match in self.special_pattern.finditer(text)]
        if not cuts:
            return ids  # the unknown token, which text may legitimately give
        bounds = [0, *cuts, len(text)]
        pieces = [text[start:end] for start, end in pairwise(bounds)]
        return [i for n, piece in enumerate(pieces) for i in self._ids(piece, False, continuation or n > 0)]

    def _variant(self, allow_special: bool, continuation: bool) -> tokenizers.Tokenizer:
        """The pipeline for one way to encode. Built on first use: each is a full copy of the vocabulary."""
        key = (allow_special, continuation)
        if key not in self._variants:
            spec = json.loads(self._backend.to_str())
            if continuation:
                spec["normalizer"] = _without_prefix(spec["normalizer"])
                spec["pre_tokenizer"] = _without_prefix(spec["pre_tokenizer"])
            variant = tokenizers.Tokenizer.from_str(json.dumps(spec))
            variant.encode_special_tokens = not allow_special
            self._variants[key] = variant
        return self._variants[key]


def _parts(component: Any) -> list[dict[str, Any]]:
    """The settings of every part of a pipeline component, sequences flattened, in no order."""
    todo = [] if component is None else [json.loads(component.__getstate__())]
    found = []
    while todo:
        part = todo.pop()
        found += [part] if part["type"] != "Sequence" else []
        todo += [p for key in ("normalizers", "pretokenizers", "decoders") for p in part.get(key, [])]
    return found


def _kinds(component: Any) -> dict[str, dict[str, Any]]:
    """Type to settings of every part of a pipeline component."""
    return {part["type"]: part for part in _parts(component)}


def _adds_prefix(pre_tokenizer: Mapping[str, Mapping[str, Any]]) -> bool:
    return bool(pre_tokenizer.get("ByteLevel", {}).get("add_prefix_space"))


def _without_prefix(part: Any) -> Any:
    """The same normalizer or pre-tokenizer, as JSON, putting no space in front of the text."""
    if part is None or part["type"] == "Prepend":
        return None
    part = dict(part)
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [kept for inner in part[key] if (kept := _without_prefix(inner)) is not None]
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    if part["type"] == "ByteLevel":
        part["add_prefix_space"] = False
    return part
