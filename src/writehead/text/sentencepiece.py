"""SentencePiece vocabularies: the `tokenizer.model` protobuf, and a `tokenizers` pipeline that gives its ids.

Source: sentencepiece_model.proto and bpe_model.cc of google/sentencepiece. The merges of a BPE model are not stored;
they follow from the scores: of all adjacent pairs whose joint spelling is a piece, the best score merges first, then
the leftmost. A pair list ranked by score does the same; pairs that spell one piece rank longer left part first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import unpack_from

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from writehead.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # GGUF's token_type uses the same numbers
SPACE = "▁"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Pieces in id order with their scores and types, and how text is prepared for them."""

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unigram: bool = False
    add_prefix: bool = True
    squeeze_spaces: bool = False
    charsmap: bytes = b""


def build(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The `tokenizers` pipeline for `vocabulary`; control and user-defined pieces are added tokens.

    Raises whatever `tokenizers` raises: call it under `refusing`.
    """
    pieces, types = vocabulary.pieces, vocabulary.types
    if not len(pieces) == len(vocabulary.scores) == len(types):
        raise TokenizerError(f"{len(pieces)} pieces, {len(vocabulary.scores)} scores and {len(types)} types differ")
    ids = {piece: index for index, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise TokenizerError("the vocabulary spells two tokens alike")
    unknown = next((index for index, kind in enumerate(types) if kind == UNKNOWN), None)
    byte_fallback = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    model: models.Model
    if vocabulary.unigram:
        model = models.Unigram(list(zip(pieces, vocabulary.scores, strict=True)), unknown, byte_fallback)
    else:
        model = models.BPE(
            ids,
            _merges(vocabulary),
            unk_token=None if unknown is None else pieces[unknown],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(list(_normalizers(vocabulary)))
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.add_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_tokens(backend, pieces, types)
    return backend


def add_tokens(backend: tokenizers.Tokenizer, pieces: Sequence[str], types: Sequence[int]) -> None:
    """Declare control tokens special and user-defined ones added; both match in the raw text. Mutates `backend`."""
    kinds = list(zip(pieces, types, strict=True))
    control = [piece for piece, kind in kinds if kind in (UNKNOWN, CONTROL) and piece]
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    backend.add_tokens([AddedToken(p, normalized=False) for p, kind in kinds if kind == USER_DEFINED and p])


def _normalizers(vocabulary: Vocabulary) -> Iterator[normalizers.Normalizer]:
    if vocabulary.charsmap:
        yield normalizers.Precompiled(vocabulary.charsmap)
    if vocabulary.squeeze_spaces:
        yield normalizers.Strip()
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if vocabulary.add_prefix:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two normal pieces into a third, best score first."""
    normal = {
        piece: (-score, index)
        for index, (piece, score, kind) in enumerate(
            zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True)
        )
        if kind == NORMAL
    }
    joins = [
        (*rank, -cut, piece[:cut], piece[cut:])
        for piece, rank in normal.items()
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    return [(left, right) for *_, left, right in sorted(joins)]


def read_model(data: bytes) -> Vocabulary:
    """Parse a `tokenizer.model` file. Raises ValueError on anything that is not one."""
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_message(value)))
            pieces.append(_message(piece.get(1, b"")).decode("utf-8"))
            scores.append(unpack_from("<f", _message(piece.get(2, b"\0\0\0\0")))[0])
            types.append(_number(piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(_message(value)))
        elif number == 3:
            normalizer = dict(_fields(_message(value)))
    kind = _number(trainer.get(3, 1))
    if not pieces or kind not in (1, 2):
        raise ValueError("it holds no unigram or BPE vocabulary")
    return Vocabulary(
        pieces=pieces,
        scores=scores,
        types=types,
        unigram=kind == 1,
        add_prefix=bool(normalizer.get(3, 1)),
        squeeze_spaces=bool(normalizer.get(4, 1)),
        charsmap=_message(normalizer.get(2, b"")),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protobuf message: varints as int, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(data, at)
        if size is None or size > len(data) - at:
            raise ValueError("it is not a complete protobuf message")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("it is not a complete protobuf message")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has the wrong type")
    return value


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    return value
