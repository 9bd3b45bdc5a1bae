"""Streaming: the pieces are the whole, bytes are exact, stop strings cut at the right place."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.text.conftest import STARCODER, TokenizerMaker, byte_level_gguf, sentencepiece_gguf, train_byte_level
from writehead.errors import UsageError
from writehead.text import TextStream, Tokenizer

Run = tuple[list[str], TextStream]


@pytest.fixture(scope="module")
def code() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_gguf(train_byte_level(STARCODER), pre="starcoder"))


@dataclass
class Pieces(Tokenizer):
    """A vocabulary of any byte strings, id by position."""

    pieces: Sequence[bytes]
    strips_leading_space: bool = False
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def run(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = (), **options: object) -> Run:
    stream = TextStream(tokenizer, stop, **options)  # type: ignore[arg-type]
    chunks = [stream.push(token_id) for token_id in ids]
    return [*chunks, stream.finish()], stream


def cut(text: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The definition: the match that ends first, the longest of those that end together."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not ends:
        return text, None
    end, _, match = min(ends)
    return text[: end if include else end - len(match)], match


PIECE = st.one_of(st.binary(min_size=0, max_size=5), st.text("aé☃🙂 \n", max_size=2).map(str.encode))


@given(st.lists(PIECE, max_size=40), st.lists(st.text("aé☃🙂 \n", min_size=1, max_size=4), max_size=40), st.booleans())
def test_chunks_join_to_the_cut_text(pieces: list[bytes], stop: list[str], include: bool) -> None:
    whole = b"".join(pieces).decode("utf-8", "replace")
    chunks, stream = run(Pieces(pieces), range(len(pieces)), stop, include_stop=include)
    expected, match = cut(whole, stop, include)
    assert "".join(chunks) == stream.text == expected
    assert stream.stopped == match


@given(st.text("ab☃🙂é", max_size=30), st.randoms(use_true_random=False))
def test_split_characters_never_show_as_replacement(text: str, rng: random.Random) -> None:
    data = text.encode()
    cuts = sorted(rng.choices(range(len(data) + 1), k=len(data) // 2))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    chunks, _ = run(Pieces(pieces), range(len(pieces)))
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=2, max_size=5), min_size=1, max_size=4))
def test_only_what_may_become_a_stop_string_is_held(text: str, stop: list[str]) -> None:
    stream = TextStream(Pieces([char.encode() for char in text]), stop)
    shown = ""
    for at in range(len(text)):
        shown += stream.push(at)
        if stream.stopped is not None:
            break
        seen = text[: at + 1]
        held = max(n for s in stop for n in range(len(s)) if seen.endswith(s[:n]))
        assert shown == seen[: len(seen) - held]


@pytest.mark.parametrize("include", [False, True])
def test_many_stop_strings_at_once(code: Tokenizer, include: bool) -> None:
    stop = [f"\n{name} " for name in ("class", "def", "if", "for", "while", "with", "import", "from", "async", "@")]
    stop += [f"<|token{n}|>" for n in range(30)]
    text = "return a\n\ndefault = 1\ndef add(a, b):"
    chunks, stream = run(code, code.encode(text), stop, include_stop=include)
    assert stream.stopped == "\ndef "
    assert "".join(chunks) == "return a\n\ndefault = 1" + ("\ndef " if include else "")
    assert chunks[0] == "r"  # a stop string can only begin with a newline or "<"


def test_the_first_to_complete_wins_and_then_the_longest() -> None:
    pieces = Pieces([b"a", b"bc", b"d"])
    assert cut("abcd", ["bcd", "c"], False) == ("ab", "c")
    chunks, stream = run(pieces, range(3), ["bcd", "c"])
    assert (chunks, stream.stopped) == (["a", "b", "", ""], "c")
    chunks, stream = run(pieces, range(3), ["d", "bcd", "cd"])
    assert (chunks, stream.stopped) == (["a", "", "", ""], "bcd")


def test_nothing_comes_after_a_stop(code: Tokenizer) -> None:
    stream = TextStream(code, ["\n"])
    for token_id in code.encode("a\nb"):
        stream.push(token_id)
    assert (stream.push(code.encode("c")[0]), stream.finish(), stream.text) == ("", "", "a")


def test_an_unfinished_stop_string_is_released_at_the_end(code: Tokenizer) -> None:
    chunks, stream = run(code, code.encode("a\n\n"), ["\n\n\n"])
    assert chunks[-1] == "\n\n"
    assert stream.stopped is None


def test_stop_may_match_in_the_flush_of_invalid_bytes() -> None:
    chunks, stream = run(Pieces([b"a\xe2\x82"]), [0], ["\ufffd"])
    assert (chunks, stream.stopped) == (["a", ""], "\ufffd")


def test_special_tokens_are_hidden_but_can_stop(code: Tokenizer) -> None:
    ids = [*code.encode("ab"), 4, *code.encode("c"), 0, *code.encode("d")]
    chunks, stream = run(code, ids, ["<|endoftext|>", "bcX"])
    assert ("".join(chunks), stream.stopped) == ("abc", "<|endoftext|>")
    assert "".join(run(code, ids, ["<|endoftext|>"], include_stop=True)[0]) == "abc<|endoftext|>"
    shown, stream = run(code, ids, ["<fim_pad>c"], skip_special=False)
    assert ("".join(shown), stream.stopped) == ("ab", "<fim_pad>c")


@pytest.mark.parametrize("text", ["def f(x):\n    return '日本語 🙂'\n", "  x", "", "<fim_prefix>"])
@pytest.mark.parametrize("skip", [False, True])
def test_streaming_equals_decoding(make: TokenizerMaker, text: str, skip: bool) -> None:
    tokenizer = make()
    ids = [1, *tokenizer.encode(text), 0]
    chunks, _ = run(tokenizer, ids, skip_special=skip)
    assert "".join(chunks) == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("text", ["def é 🙂", "  two", " one", ""])
def test_sentencepiece_leading_space(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_gguf(["▁de", "▁def"]))
    ids = tokenizer.encode(text)
    assert "".join(run(tokenizer, ids)[0]) == text == tokenizer.decode(ids)
    assert "".join(run(tokenizer, ids, prompt_ids=[1])[0]) == text
    after = "".join(run(tokenizer, ids, prompt_ids=tokenizer.encode("x"))[0])
    assert after == tokenizer.decode(ids, continuation=True) == (" " + text if text else "")


@pytest.mark.parametrize("cut_at", range(1, 4))
def test_a_character_that_the_prompt_leaves_unfinished(cut_at: int) -> None:
    data = "🙂".encode()
    tokenizer = Pieces([b"ab", data[:cut_at], data[cut_at:], b"!"])
    chunks, _ = run(tokenizer, [2, 3], prompt_ids=[0, 1])
    assert chunks == ["🙂", "!", ""]


def test_work_per_token_does_not_grow() -> None:
    tokenizer = Pieces([b"ab"] * 20_000)
    stream = TextStream(tokenizer, ["abac", "zz"])
    longest = max(len(stream.push(at)) for at in range(20_000))
    assert longest <= 4
    assert len(stream._held) == 2  # nothing but the possible beginning of a stop string is kept


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3]])
def test_empty_stop_strings_are_refused(code: Tokenizer, stop: list[str]) -> None:
    with pytest.raises(UsageError, match="stop string must be text of at least one character"):
        TextStream(code, stop)


def test_a_token_that_is_not_shown_ends_what_the_prompt_left_unfinished() -> None:
    tokenizer = Pieces([b"ab\xf0\x9f", b"<mid>", b" x", b"\x99\x82"], strips_leading_space=True)
    tokenizer.special_ids = frozenset({1})
    assert run(tokenizer, [2], prompt_ids=[0, 1])[0] == [" x", ""]
    assert run(tokenizer, [2], prompt_ids=[1])[0] == ["x", ""]
    assert run(tokenizer, [3], prompt_ids=[0])[0] == ["🙂", ""]


@given(st.lists(PIECE, max_size=20), st.lists(st.text("aé \n", min_size=1, max_size=3), max_size=5), st.integers(0, 12))
def test_no_stop_string_matches_within_the_first_tokens(pieces: list[bytes], stop: list[str], minimum: int) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    early = "".join(map(decoder.decode, pieces[:minimum]))
    text = early + "".join(map(decoder.decode, pieces[minimum:])) + decoder.decode(b"", final=True)
    flushed = len(text) if len(pieces) <= minimum else len(early)  # without a later token, the flush is early as well
    ends = [
        (end, -len(s), s)
        for s in stop
        for end in range(max(len(s), flushed + 1), len(text) + 1)
        if text[end - len(s) : end] == s
    ]
    end, length, match = min(ends, default=(len(text), 0, None))
    chunks, stream = run(Pieces(pieces), range(len(pieces)), stop, min_tokens=minimum)
    assert ("".join(chunks), stream.stopped) == (text[: end + length], match)


def test_a_special_token_stops_only_after_the_first_tokens(code: Tokenizer) -> None:
    ids = [*code.encode("ab"), 0, *code.encode("c"), 0]
    chunks, stream = run(code, ids, ["<|endoftext|>"], min_tokens=len(ids) - 1)
    assert ("".join(chunks), stream.stopped) == ("abc", "<|endoftext|>")
    chunks, stream = run(code, ids, ["<|endoftext|>"], min_tokens=len(ids))
    assert ("".join(chunks), stream.stopped) == ("abc", None)
