"""Fill-in-the-middle: every family's order of ids, text that spells sentinels, cutting, stop ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.text.conftest import (
    STARCODER,
    TokenizerMaker,
    byte_level_gguf,
    sentencepiece_gguf,
    train_byte_level,
)
from writehead.errors import PromptError, UsageError
from writehead.text import FimMode, Tokenizer, detect_fim, fim_prompt, stop_ids
from writehead.text.source import Source

PREFIX, SUFFIX = "def add(a, b):\n    ", "\n\nfor i in range(12):\n"

# Family: its special tokens, then psm and spm with P and S for the code ("" where there is no such order).
FAMILIES = {
    "santacoder": (
        ["<|endoftext|>", "<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"],
        "<fim-prefix> P <fim-suffix> S <fim-middle>",
        "<fim-prefix> <fim-suffix> S <fim-middle> P",
    ),
    "starcoder": (
        STARCODER,
        "<fim_prefix> P <fim_suffix> S <fim_middle>",
        "<fim_prefix> <fim_suffix> S <fim_middle> P",
    ),
    "qwen": (
        ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>", "<|im_end|>"],
        "<|fim_prefix|> P <|fim_suffix|> S <|fim_middle|>",
        "<|fim_prefix|> <|fim_suffix|> S <|fim_middle|> P",
    ),
    "codegemma": (
        ["<bos>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_separator|>"],
        "<bos> <|fim_prefix|> P <|fim_suffix|> S <|fim_middle|>",
        "<bos> <|fim_prefix|> <|fim_suffix|> S <|fim_middle|> P",
    ),
    "deepseek": (
        ["<bos>", "<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>", "<|EOT|>"],
        "<bos> <\uff5cfim▁begin\uff5c> P <\uff5cfim▁hole\uff5c> S <\uff5cfim▁end\uff5c>",
        "",
    ),
    "codestral": (["<bos>", "[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "", "<bos> [SUFFIX] S [PREFIX] P"),
}


def build(make: TokenizerMaker, family: str) -> Tokenizer:
    special = FAMILIES[family][0]
    return make(special, **({"bos_token": "<bos>", "add_bos_token": True} if "<bos>" in special else {}))


def expected(tokenizer: Tokenizer, order: str) -> list[int]:
    texts = {"P": PREFIX, "S": SUFFIX}
    ids: list[int] = []
    for word in order.split():
        spelled = tokenizer.id_of(word)
        ids += tokenizer.encode(texts[word], add_special=False) if spelled is None or word in texts else [spelled]
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_order_of_each_family(make: TokenizerMaker, family: str) -> None:
    tokenizer = build(make, family)
    fmt = detect_fim(tokenizer)
    assert fmt is not None
    assert fmt.name == family
    modes: dict[FimMode, str] = {"psm": FAMILIES[family][1], "spm": FAMILIES[family][2]}
    for mode, order in modes.items():
        if order:
            assert fim_prompt(tokenizer, fmt, PREFIX, SUFFIX, mode=mode, max_tokens=500) == expected(tokenizer, order)
        else:
            with pytest.raises(UsageError, match=f"The {family} format has no '{mode}' order"):
                fim_prompt(tokenizer, fmt, PREFIX, SUFFIX, mode=mode, max_tokens=500)
    default = fim_prompt(tokenizer, fmt, PREFIX, SUFFIX, max_tokens=500)
    assert default == expected(tokenizer, modes["psm"] or modes["spm"])


def codellama(**more: Any) -> Tokenizer:
    data = sentencepiece_gguf(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", "▁de", "▁def", "de"], **more)
    data["tokenizer.ggml.token_type"][259:263] = [3, 3, 3, 3]
    return Tokenizer.from_gguf(data)


def test_codellama_puts_its_space_before_the_prefix_only() -> None:
    tokenizer = codellama()
    fmt = detect_fim(tokenizer)
    assert fmt is not None
    ids = fim_prompt(tokenizer, fmt, "def", "def", max_tokens=50)
    assert [tokenizer.spelling(i) for i in ids] == ["<s>", "▁<PRE>", "▁def", "▁<SUF>", "de", "f", "▁<MID>"]
    ids = fim_prompt(tokenizer, fmt, "def", "def", mode="spm", max_tokens=50)
    assert [tokenizer.spelling(i) for i in ids] == ["<s>", "▁<PRE>", "▁<SUF>", "de", "f", "▁<MID>", "▁def"]
    spelled = fim_prompt(tokenizer, fmt, " <PRE> <MID>", " <EOT>", max_tokens=500)
    assert [i for i in spelled if i in tokenizer.special_ids] == [1, fmt.prefix_id, fmt.suffix_id, fmt.middle_id]
    assert tokenizer.id_of("▁<EOT>") in stop_ids(tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_code_that_spells_sentinels_stays_text(make: TokenizerMaker, family: str) -> None:
    tokenizer = build(make, family)
    fmt = detect_fim(tokenizer)
    assert fmt is not None
    code = "".join(FAMILIES[family][0])
    ids = fim_prompt(tokenizer, fmt, code, code, max_tokens=10_000)
    control = [i for i in ids if i in tokenizer.special_ids]
    bos = [0] if "<bos>" in code else []
    sentinels = {fmt.prefix_id, fmt.suffix_id, fmt.middle_id} - {None}
    assert len(control) == len(bos) + len(sentinels)
    assert set(control) == {*bos, *sentinels}
    assert tokenizer.decode(ids) == code * 2


def test_the_other_familys_markers_are_not_taken_for_this_ones(make: TokenizerMaker) -> None:
    santacoder = build(make, "santacoder")
    assert len(santacoder.encode("<fim_prefix>", allow_special=True)) > 1
    assert len(santacoder.encode("<fim-prefix>", allow_special=True)) == 1
    assert detect_fim(make(["<|endoftext|>"])) is None


def test_square_brackets_in_an_ordinary_vocabulary_are_no_sentinels() -> None:
    data = byte_level_gguf(train_byte_level(["<|endoftext|>"]), pre="starcoder")
    data["tokenizer.ggml.tokens"] += ["[PREFIX]", "[SUFFIX]"]
    data["tokenizer.ggml.token_type"] += [1, 1]
    assert detect_fim(Tokenizer.from_gguf(data)) is None
    data["tokenizer.ggml.token_type"][-2:] = [3, 3]
    assert detect_fim(Tokenizer.from_gguf(data)) is not None


@pytest.mark.parametrize("old", [False, True])
def test_ids_that_a_gguf_file_states(old: bool) -> None:
    data = byte_level_gguf(train_byte_level(["<a>", "<b>", "<c>", "<d>"]), pre="starcoder")
    names = ["prefix", "suffix", "middle"] if old else ["fim_pre", "fim_suf", "fim_mid"]
    data |= {f"tokenizer.ggml.{name}_token_id": n for n, name in enumerate([*names, "fim_pad"])}
    tokenizer = Tokenizer.from_gguf(data)
    fmt = detect_fim(tokenizer)
    assert fmt is not None
    assert (fmt.name, fmt.prefix_id, fmt.suffix_id, fmt.middle_id) == ("gguf", 0, 1, 2)
    assert fmt.stop_ids == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("num_left", "num_right", "room", "kept"),
    [
        (10, 10, 20, (10, 10)),
        (100, 100, 20, (15, 5)),
        (100, 2, 20, (18, 2)),
        (3, 100, 20, (3, 17)),
        (100, 0, 20, (20, 0)),
        (0, 100, 20, (0, 20)),
        (100, 100, 1, (0, 1)),
        (100, 100, 0, (0, 0)),
    ],
)
@pytest.mark.parametrize("mode", ["psm", "spm"])
def test_cutting_keeps_the_sentinels_and_what_is_near_the_cursor(
    make: TokenizerMaker, num_left: int, num_right: int, room: int, kept: tuple[int, int], mode: FimMode
) -> None:
    tokenizer = make()
    fmt = detect_fim(tokenizer)
    assert fmt is not None
    digits = "0123456789" * 10  # one token each
    prefix, suffix = digits[100 - num_left :], digits[:num_right]
    ids = fim_prompt(tokenizer, fmt, prefix, suffix, mode=mode, max_tokens=room + 3)
    left, right = prefix[num_left - kept[0] :], suffix[: kept[1]]
    order = {"psm": f"<fim_prefix>{left}<fim_suffix>{right}<fim_middle>"}
    order["spm"] = f"<fim_prefix><fim_suffix>{right}<fim_middle>{left}"
    assert tokenizer.decode(ids, skip_special=False) == order[mode]
    assert len(ids) == 3 + sum(kept) <= room + 3


WORDS = st.sampled_from(
    ["def", "x", " return", "\n", "\n    ", "\t", "\r\n", "  ", "é", "日本", "12", "_", "'s", "().", "a" * 70, " " * 40]
)
CODE = st.lists(WORDS, max_size=400).map("".join)


class Counting(Tokenizer):
    """Counts the characters that it encodes."""

    num_chars = 0

    def encode(self, text: str, **options: bool) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, **options)


def counting(*, digits: bool = True) -> Counting:
    return Counting(Source(origin="a test", backend=train_byte_level(STARCODER, digits=digits)))


@settings(max_examples=150)
@given(
    prefix=CODE, suffix=CODE, room=st.integers(0, 60), digits=st.booleans(), spells=st.sampled_from(["", STARCODER[1]])
)
def test_what_is_far_from_the_cursor_changes_nothing(
    prefix: str, suffix: str, room: int, digits: bool, spells: str
) -> None:
    tokenizer = counting(digits=digits)
    assert tokenizer.splits_words
    fmt = detect_fim(tokenizer)
    assert fmt is not None
    left = tokenizer.encode(spells + prefix, add_special=False)
    right = tokenizer.encode(suffix + spells, add_special=False)
    num_right = min(len(right), room - min(len(left), int(room * 0.75)))
    num_left = min(len(left), room - num_right)
    expected = [fmt.prefix_id, *left[len(left) - num_left :], fmt.suffix_id, *right[:num_right], fmt.middle_id]
    assert fim_prompt(tokenizer, fmt, spells + prefix, suffix + spells, max_tokens=room + 3) == expected


def test_what_is_far_from_the_cursor_is_not_encoded() -> None:
    tokenizer = counting()
    fmt = detect_fim(tokenizer)
    assert fmt is not None
    code = "def add(a, b):\n    return a + b\n" * 30_000
    assert len(fim_prompt(tokenizer, fmt, code, code, max_tokens=203)) == 203
    assert tokenizer.num_chars < 20_000
    blank = " " * 100_000  # no place to cut it
    assert len(fim_prompt(tokenizer, fmt, blank + code, code + blank, max_tokens=203)) == 203
    with pytest.raises(PromptError, match="valid Unicode"):
        fim_prompt(tokenizer, fmt, "\ud800" + code, code, max_tokens=203)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"pre_tokenizer": {"type": "Punctuation", "behavior": "Contiguous"}},
    ],
)
def test_only_a_known_split_is_relied_upon(change: dict[str, Any]) -> None:
    spec = json.loads(train_byte_level(STARCODER).to_str()) | change
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert not Tokenizer(Source(origin="a test", backend=backend)).splits_words


def test_no_room_for_the_sentinels(make: TokenizerMaker) -> None:
    tokenizer = make()
    fmt = detect_fim(tokenizer)
    assert fmt is not None
    with pytest.raises(PromptError, match=r"2 tokens cannot hold the markers .* allow 3"):
        fim_prompt(tokenizer, fmt, "a", "b", max_tokens=2)


def test_starcoder_prompts_have_no_bos_even_if_the_tokenizer_adds_one(make: TokenizerMaker) -> None:
    tokenizer = make(bos_token="<|endoftext|>", add_bos_token=True)
    fmt = detect_fim(tokenizer)
    assert fmt is not None
    assert fim_prompt(tokenizer, fmt, "", "", max_tokens=9) == [1, 3, 2]


def test_stop_ids_by_family(make: TokenizerMaker) -> None:
    def spelled(tokenizer: Tokenizer, ids: frozenset[int]) -> set[str | None]:
        return {tokenizer.spelling(i) for i in ids}

    starcoder = make(eos_token="<|endoftext|>")
    assert spelled(starcoder, stop_ids(starcoder)) == {"<|endoftext|>", "<file_sep>"}
    assert spelled(starcoder, stop_ids(starcoder, detect_fim(starcoder))) == set(STARCODER)
    qwen = build(make, "qwen")
    assert spelled(qwen, stop_ids(qwen)) == {"<|file_sep|>", "<|im_end|>"}
    santacoder = build(make, "santacoder")
    assert spelled(santacoder, stop_ids(santacoder)) == {"<|endoftext|>"}
    assert stop_ids(santacoder, detect_fim(santacoder)) == {0, 1, 2, 3, 4}
    deepseek = build(make, "deepseek")
    assert spelled(deepseek, stop_ids(deepseek)) == {"<|EOT|>"}
