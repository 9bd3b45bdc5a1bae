"""Tokenizers from GGUF metadata: the named pre-tokenizers, special ids, SentencePiece, damaged metadata."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Regex, pre_tokenizers

from tests.unit.text.conftest import CORPUS, STARCODER, byte_level_gguf, sentencepiece_gguf, train_byte_level
from writehead.errors import TokenizerError
from writehead.text import Tokenizer
from writehead.text.gguf import PRE_TOKENIZERS, byte_level_splitter

SAMPLES = [
    *CORPUS,
    "2023 650841823   123  4.5e10",
    "I'LL don't it's WE'VE 'S",
    "a  b\t\tc \n\n  d\r\n\r\n\te   ",
    "½ Ⅷ ٣٤ 日本語 héllo e\u0301 🙂 \u00a0\u2003x",
    "HTMLParser fooBar_baz <html>$+=^~|`  --x",
    "",
]


def split(splitter: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]


def family(*parts: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(parts))


def regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

# The pre-tokenizers of the families' own tokenizer.json files.
PUBLISHED = {
    "gpt-2": family(WORDS),
    "starcoder": family(pre_tokenizers.Digits(individual_digits=True), WORDS),
    "refact": family(pre_tokenizers.Digits(individual_digits=True), WORDS),
    "smollm": family(pre_tokenizers.Digits(individual_digits=True), WORDS),
    "command-r": family(pre_tokenizers.Digits(individual_digits=True), WORDS),
    "falcon": family(pre_tokenizers.Punctuation("contiguous"), WORDS, regex("[0-9][0-9][0-9]")),
    "deepseek-coder": family(
        regex("[\r\n]"),
        regex("\\s?\\p{L}+"),
        regex("\\s?\\p{P}+"),
        regex("[一-龥ࠀ-一가-퟿]+"),
        pre_tokenizers.Digits(individual_digits=True),
        BYTES,
    ),
    "llama-bpe": family(
        regex(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
            "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
        ),
        BYTES,
    ),
    "qwen2": family(
        regex(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
            "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
        ),
        BYTES,
    ),
}


@pytest.mark.parametrize("pre", PUBLISHED)
@pytest.mark.parametrize("text", SAMPLES)
def test_pre_tokenizer_is_the_one_of_the_family(pre: str, text: str) -> None:
    assert split(byte_level_splitter(PRE_TOKENIZERS[pre]), text) == split(PUBLISHED[pre], text)


DISTINCT = sorted({splits: name for name, splits in PRE_TOKENIZERS.items()}.values())


@pytest.mark.parametrize("pre", DISTINCT)
def test_no_pre_tokenizer_loses_or_changes_text(pre: str) -> None:
    data = byte_level_gguf(train_byte_level(STARCODER), pre=pre)
    tokenizer = Tokenizer.from_gguf(data)
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("starcoder", ["=", "ĠĠ", "1", "2", "3", "4"]),
        ("gpt-2", ["=", "Ġ", "Ġ1234"]),
        ("llama-bpe", ["=", "Ġ", "Ġ", "123", "4"]),
        ("falcon", ["=", "Ġ", "Ġ", "123", "4"]),
        ("tekken", ["=", "Ġ", "Ġ", "1", "2", "3", "4"]),
        ("deepseek-v3", ["=", "ĠĠ", "123", "4"]),
    ],
)
def test_digits_after_spaces(pre: str, pieces: list[str]) -> None:
    assert split(byte_level_splitter(PRE_TOKENIZERS[pre]), "=  1234") == pieces


def test_ids_equal_the_same_tokenizers_json() -> None:
    backend = train_byte_level(STARCODER)
    tokenizer = Tokenizer.from_gguf(byte_level_gguf(backend, pre="starcoder"))
    for text in SAMPLES:
        assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.encode("<fim_prefix>", allow_special=True) == [1]
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_special_ids_and_bos() -> None:
    data = byte_level_gguf(train_byte_level(STARCODER), pre="starcoder")
    ids = {"bos_token_id": 0, "eos_token_id": 1, "eot_token_id": 5, "padding_token_id": 4}
    data |= {f"tokenizer.ggml.{key}": value for key, value in ids.items()} | {"tokenizer.chat_template": "hi"}
    tokenizer = Tokenizer.from_gguf(data)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.chat_template) == (
        0,
        frozenset({1, 5}),
        4,
        "hi",
    )
    assert not tokenizer.add_bos
    assert Tokenizer.from_gguf(data | {"tokenizer.ggml.add_bos_token": True}).encode("") == [0]


@pytest.mark.parametrize(("pre", "bos"), [("llama-bpe", [0]), ("tekken", [0]), ("qwen2", [])])
def test_bos_where_the_file_is_silent(pre: str, bos: list[int]) -> None:
    data = byte_level_gguf(train_byte_level(STARCODER), pre=pre) | {"tokenizer.ggml.bos_token_id": 0}
    assert Tokenizer.from_gguf(data).encode("") == bos


def test_old_files_without_a_pre_tokenizer_go_by_the_architecture() -> None:
    data = byte_level_gguf(train_byte_level(STARCODER), pre="") | {"general.architecture": "starcoder"}
    del data["tokenizer.ggml.pre"]
    assert Tokenizer.from_gguf(data).encode("  12") == train_byte_level(STARCODER).encode("  12").ids


def test_padding_rows_have_no_bytes() -> None:
    data = byte_level_gguf(train_byte_level(STARCODER), pre="starcoder")
    data["tokenizer.ggml.tokens"].append("[PAD999]")
    data["tokenizer.ggml.token_type"].append(5)
    tokenizer = Tokenizer.from_gguf(data)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""


def test_user_defined_tokens_are_matched_in_text() -> None:
    data = byte_level_gguf(train_byte_level(STARCODER), pre="starcoder")
    data["tokenizer.ggml.tokens"].append("<tool_call>")
    data["tokenizer.ggml.token_type"].append(4)
    tokenizer = Tokenizer.from_gguf(data)
    assert tokenizer.encode("<tool_call>") == [tokenizer.vocab_size - 1]
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "<tool_call>"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "model 'bert', expected 'gpt2' or 'llama'"),
        ({"tokenizer.ggml.model": 3}, "model is of type int, expected str"),
        ({"tokenizer.ggml.pre": "qwen35-next"}, "pre-tokenizer 'qwen35-next' is unknown"),
        ({"tokenizer.ggml.tokens": []}, "0 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is not a list of str"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "1 distinct"),
        ({"tokenizer.ggml.token_type": [1]}, "with 1 types"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "cannot be used"),
        ({"tokenizer.ggml.merges": "a b"}, "merges is not a list of str"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000, but the vocabulary has"),
        ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id is -1"),
        ({"tokenizer.ggml.eos_token_id": True}, "eos_token_id is of type bool"),
        ({"tokenizer.ggml.fim_pre_token_id": 10**6}, "fim_pre_token_id is 1000000"),
        ({"tokenizer.chat_template": 1}, "chat_template is of type int"),
    ],
)
def test_damaged_metadata_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    data = byte_level_gguf(train_byte_level(STARCODER, size=300), pre="starcoder") | change
    with pytest.raises(TokenizerError, match=r"^model\.gguf: .*" + reason):
        Tokenizer.from_gguf(data, origin="model.gguf")


def test_sentencepiece_scores_must_fit() -> None:
    with pytest.raises(TokenizerError, match=r"differ"):
        Tokenizer.from_gguf(sentencepiece_gguf() | {"tokenizer.ggml.scores": [0.0]})


def test_sentencepiece_defaults_and_bytes() -> None:
    data = sentencepiece_gguf(["▁de", "▁def", "de"])
    del data["tokenizer.ggml.bos_token_id"], data["tokenizer.ggml.eos_token_id"]
    tokenizer = Tokenizer.from_gguf(data)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, frozenset({2}), True)
    ids = tokenizer.encode("def é")
    assert [tokenizer.spelling(i) for i in ids] == ["<s>", "▁def", "▁", "<0xC3>", "<0xA9>"]
    assert [tokenizer.token_bytes(i) for i in ids[1:]] == [b" def", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "def é"
    assert tokenizer.decode(ids, skip_special=False) == "<s> def é"
    assert tokenizer.encode("</s>", add_special=False) != [2]


def test_sentencepiece_without_the_leading_space() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_gguf(["de"]) | {"tokenizer.ggml.add_space_prefix": False})
    assert [tokenizer.spelling(i) for i in tokenizer.encode("def", add_special=False)] == ["de", "f"]
    assert tokenizer.decode(tokenizer.encode(" x")) == " x"


def test_user_defined_spaces_of_gemma() -> None:
    data = sentencepiece_gguf(["  ", "    "]) | {"tokenizer.ggml.add_space_prefix": False}
    data["tokenizer.ggml.token_type"][259:261] = [4, 4]
    tokenizer = Tokenizer.from_gguf(data)
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("      a", add_special=False)] == [b"    ", b"  ", b"a"]


def test_arrays_may_be_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    data = sentencepiece_gguf(["de"])
    changed = data | {key: numpy.array(data[key]) for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")}
    assert Tokenizer.from_gguf(changed).encode("def") == Tokenizer.from_gguf(data).encode("def")


def test_added_token_text_is_not_read_as_the_byte_alphabet() -> None:
    backend = train_byte_level(["<|endoftext|>"])
    backend.add_tokens([AddedToken("日é", normalized=False)])
    data = byte_level_gguf(backend, pre="starcoder")
    data["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = Tokenizer.from_gguf(data)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == "日é".encode()
