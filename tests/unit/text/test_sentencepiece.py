"""The SentencePiece algorithm against a plain reading of bpe_model.cc, and the protobuf reader."""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.text.conftest import sentencepiece_gguf
from writehead.errors import TokenizerError
from writehead.text import Tokenizer
from writehead.text.sentencepiece import read_model


def reference(pieces: dict[str, float], text: str) -> list[str]:
    """Merge the best-scoring adjacent pair, the leftmost of equals, until none is a piece."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [
            (pieces[left + right], -at) for at, (left, right) in enumerate(pairwise(symbols)) if left + right in pieces
        ]
        if not joins:
            return symbols
        at = -max(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@settings(max_examples=50)
@given(
    st.lists(st.text("ab▁c", min_size=2, max_size=4), max_size=12, unique=True),
    st.text("abc ", max_size=24),
    st.randoms(use_true_random=False),
)
def test_merges_follow_the_scores(words: list[str], text: str, rng: random.Random) -> None:
    data = sentencepiece_gguf(words)
    scores = list(range(len(data["tokenizer.ggml.scores"])))
    rng.shuffle(scores)
    data["tokenizer.ggml.scores"] = [-float(score) for score in scores]
    pieces = dict(zip(data["tokenizer.ggml.tokens"], data["tokenizer.ggml.scores"], strict=True))
    tokenizer = Tokenizer.from_gguf(data)
    assert [tokenizer.spelling(i) for i in tokenizer.encode(text, add_special=False)] == reference(pieces, text)


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def model_file(data: dict[str, object], *, kind: int, prefix: int = 1, squeeze: int = 0) -> bytes:
    """A tokenizer.model with the vocabulary of this GGUF metadata."""
    columns = (data[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    out = b""
    for piece, score, type_ in zip(*columns, strict=True):
        score_field = varint(2 << 3 | 5) + struct.pack("<f", score)
        out += field(1, field(1, piece.encode()) + score_field + field(3, type_))
    return out + field(2, field(3, kind)) + field(3, field(1, b"identity") + field(3, prefix) + field(4, squeeze))


def from_model(folder: Path, content: bytes) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<s>", "eos_token": "</s>"}')
    return Tokenizer.from_directory(folder)


@pytest.mark.parametrize("text", ["def return", "  a\n\n    b", "é 2023", "", "<s>"])
def test_model_file_gives_the_ids_of_the_same_gguf(tmp_path: Path, text: str) -> None:
    data = sentencepiece_gguf(["▁de", "▁def", "de", "re", "tu", "rn", "ret", "▁▁", "▁▁▁▁"])
    tokenizer = from_model(tmp_path, model_file(data, kind=2))
    assert tokenizer.encode(text) == Tokenizer.from_gguf(data).encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, frozenset({2}))


def test_normalizer_settings_of_a_model_file(tmp_path: Path) -> None:
    data = sentencepiece_gguf(["de"])
    bare = from_model(tmp_path, model_file(data, kind=2, prefix=0))
    assert [bare.spelling(i) for i in bare.encode("def", add_special=False)] == ["de", "f"]
    squeezed = from_model(tmp_path, model_file(data, kind=2, squeeze=1))
    assert squeezed.decode(squeezed.encode("  a   b ")) == "a b"


def test_unigram_model_file_takes_the_best_segmentation(tmp_path: Path) -> None:
    data = sentencepiece_gguf(["ab", "abc", "bc"])
    best = {"▁": -1.0, "a": -5.0, "b": -5.0, "c": -5.0, "ab": -6.0, "bc": -3.0, "abc": -9.0}
    tokens = data["tokenizer.ggml.tokens"]
    data["tokenizer.ggml.scores"] = [best.get(token, -20.0) for token in tokens]
    tokenizer = from_model(tmp_path, model_file(data, kind=1))
    assert [tokenizer.spelling(i) for i in tokenizer.encode("abc", add_special=False)] == ["▁", "a", "bc"]
    assert tokenizer.id_of("<s>") not in tokenizer.encode("<s>", add_special=False)


@pytest.mark.parametrize(
    "content", [b"", b"\x0a", b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 20, b"\x08\x01", b"\x0b", b"{}"]
)
def test_damaged_model_file_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: this is not a SentencePiece model"):
        from_model(tmp_path, content)


def test_mutated_model_files_never_fail_otherwise(tmp_path: Path) -> None:
    good = model_file(sentencepiece_gguf(["de", "▁de"]), kind=2)
    assert len(read_model(good).pieces) > 256
    rng = random.Random(0)
    refused = 0
    for round_ in range(100):
        data = bytearray(good[: rng.randrange(len(good))] if round_ % 2 else good)
        for _ in range(rng.randint(1, 3)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            from_model(tmp_path, bytes(data)).encode("def x")
        except TokenizerError:
            refused += 1
    assert refused > 25
