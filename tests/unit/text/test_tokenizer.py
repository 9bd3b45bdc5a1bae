"""Tokenizers from a checkpoint's files: ids, bytes, special tokens, damaged files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tests.unit.text.conftest import (
    CORPUS,
    STARCODER,
    TokenizerMaker,
    llama_json,
    train_byte_level,
    write_checkpoint,
)
from writehead.errors import PromptError, TokenizerError
from writehead.text import Tokenizer
from writehead.text.source import Source

SAMPLES = [
    *CORPUS,
    "2023 650841823   123",
    "python3 ./src -- a , b . c 's",
    "\t\t  x\r\n\r\n \u00a0y\u2003z",
    "½ Ⅷ ٣٤ 🙂 e\u0301",
    "   ",
    "",
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("shared")
    return Tokenizer.from_directory(write_checkpoint(folder, train_byte_level(STARCODER), eos_token="<|endoftext|>"))


@pytest.mark.parametrize("text", SAMPLES)
def test_ids_are_those_of_tokenizer_json(shared: Tokenizer, text: str) -> None:
    reference = train_byte_level(STARCODER)
    assert shared.encode(text) == reference.encode(text).ids
    assert shared.decode(shared.encode(text)) == text


def test_digits_stay_single_after_a_run_of_spaces(shared: Tokenizer) -> None:
    # transformers' GPT2Tokenizer drops the Digits step; then the last space joins the number.
    assert [shared.token_bytes(i) for i in shared.encode("=  123")] == [b"=", b"  ", b"1", b"2", b"3"]


@settings(max_examples=60)
@given(st.text())
def test_decoding_inverts_encoding(shared: Tokenizer, text: str) -> None:
    ids = shared.encode(text)
    assert shared.decode(ids) == text
    assert b"".join(map(shared.token_bytes, ids)) == text.encode()


@settings(max_examples=60)
@given(st.lists(st.integers(min_value=-5, max_value=460), max_size=20))
def test_decoding_is_the_decoding_of_the_joined_bytes(shared: Tokenizer, ids: list[int]) -> None:
    data = b"".join(shared.token_bytes(i) for i in ids if i not in shared.special_ids)
    assert shared.decode(ids) == data.decode("utf-8", "replace")


def test_decoding_neither_cleans_spaces_nor_shows_special_tokens_unasked(shared: Tokenizer) -> None:
    ids = [*shared.encode("python3 ./src ?"), 1, 0]
    assert shared.decode(ids) == "python3 ./src ?"
    assert shared.decode(ids, skip_special=False) == "python3 ./src ?<fim_prefix><|endoftext|>"


def test_ids_beyond_the_vocabulary_have_no_bytes(shared: Tokenizer) -> None:
    assert [shared.token_bytes(i) for i in (-1, shared.vocab_size, 10**9, 2**40)] == [b""] * 4
    assert shared.decode([10**9, *shared.encode("a")]) == "a"


@settings(max_examples=100)
@given(st.text(alphabet=st.one_of(st.sampled_from(" def▁\n"), st.characters(codec="utf-8"))))
def test_no_token_stands_for_more_bytes_than_the_longest(shared: Tokenizer, text: str) -> None:
    metaspace = llama_json()
    metaspace.normalizer = None
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backends = (llama_json(), metaspace)
    for tokenizer in (shared, *(Tokenizer(Source(origin="a test", backend=b)) for b in backends)):
        longest = tokenizer.max_token_bytes
        assert longest is not None
        assert len(text.encode()) <= longest * len(tokenizer.encode(text, add_special=False))


def test_the_longest_token_is_counted_in_bytes(shared: Tokenizer) -> None:
    ordinary = [i for i in range(shared.vocab_size) if i not in shared.special_ids]
    special = len("<|endoftext|>")
    assert shared.max_token_bytes == max(special, *(len(shared.token_bytes(i)) for i in ordinary))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "long"}, "content": "x"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"added_tokens": [{"id": 420, "content": "<t>", "single_word": False, "lstrip": True, "rstrip": False,
                           "normalized": False, "special": False}]},
    ],
)  # fmt: skip
def test_a_token_may_stand_for_text_of_any_length(change: dict[str, Any]) -> None:
    backend = train_byte_level(STARCODER)
    changed = tokenizers.Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | change))
    assert Tokenizer(Source(origin="a test", backend=backend)).max_token_bytes is not None
    assert Tokenizer(Source(origin="a test", backend=changed)).max_token_bytes is None


def test_a_vocabulary_that_lacks_a_byte_drops_text() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.ByteLevel()
    assert Tokenizer(Source(origin="a test", backend=backend)).max_token_bytes is None


def test_every_byte_has_a_token(shared: Tokenizer) -> None:
    assert {shared.token_bytes(i) for i in range(shared.vocab_size)} >= {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("spelling", STARCODER)
def test_text_that_spells_a_special_token_stays_text(shared: Tokenizer, spelling: str) -> None:
    text = f"x = {spelling!r}\n{spelling}"
    assert shared.special_ids.isdisjoint(shared.encode(text))
    assert shared.decode(shared.encode(text)) == text
    special = shared.id_of(spelling)
    assert shared.encode(spelling, allow_special=True) == [special]
    assert shared.spelling(special or 0) == spelling


def test_fim_tokens_that_are_plain_vocabulary_become_special(tmp_path: Path) -> None:
    backend = train_byte_level(["<|endoftext|>"])
    model = json.loads(backend.to_str())
    for spelling in ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"):
        model["model"]["vocab"][spelling] = len(model["model"]["vocab"])
    folder = write_checkpoint(tmp_path, tokenizers.Tokenizer.from_str(json.dumps(model)), eos_token="<|endoftext|>")
    tokenizer = Tokenizer.from_directory(folder)
    sentinel = tokenizer.id_of("<fim-prefix>")
    assert sentinel in tokenizer.special_ids
    assert tokenizer.encode("<fim-prefix>", allow_special=True) == [sentinel]
    assert tokenizer.encode("<fim-prefix>") != [sentinel]
    assert tokenizer.decode([sentinel or 0]) == ""


def test_added_tokens_that_are_not_special_are_control_tokens_if_they_look_so(tmp_path: Path) -> None:
    backend = train_byte_level(["<|endoftext|>"])
    backend.add_tokens([AddedToken("<|fim_prefix|>", normalized=False), AddedToken("<think>", normalized=False)])
    tokenizer = Tokenizer.from_directory(write_checkpoint(tmp_path, backend))
    assert tokenizer.id_of("<|fim_prefix|>") in tokenizer.special_ids
    assert tokenizer.encode("<think>") == [tokenizer.id_of("<think>")]


def test_special_token_that_is_an_ordinary_piece_is_cut_apart(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", *"<s>ab"]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in dict.fromkeys(pieces)], 0, False))
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens(["<unk>", "<s>"])
    tokenizer = Tokenizer.from_directory(write_checkpoint(tmp_path, backend))
    assert [tokenizer.spelling(i) for i in tokenizer.encode("a<s>b")] == ["a", "<", "s", ">", "b"]
    assert tokenizer.encode("a<s>", allow_special=True) == [tokenizer.id_of("a"), tokenizer.id_of("<s>")]
    assert tokenizer.encode("é") == [0]  # the unknown token is special too, and is what this text is


@pytest.mark.parametrize(
    ("config", "prefix"),
    [({}, []), ({"add_bos_token": False}, []), ({"add_bos_token": True, "bos_token": "<|endoftext|>"}, [0])],
)
def test_add_bos(make: TokenizerMaker, config: dict[str, object], prefix: list[int]) -> None:
    tokenizer = make(**config)
    assert tokenizer.encode("a") == [*prefix, *tokenizer.encode("a", add_special=False)]
    assert tokenizer.add_bos is bool(prefix)


def test_bos_of_the_post_processor(tmp_path: Path) -> None:
    plain = Tokenizer.from_directory(write_checkpoint(tmp_path / "a", llama_json(), bos_token="<s>"))
    without = Tokenizer.from_directory(write_checkpoint(tmp_path / "b", llama_json(), add_bos_token=False))
    assert plain.encode("de") == [1, *without.encode("de")]
    assert (plain.add_bos, without.add_bos) == (True, False)


def test_add_bos_without_a_bos_token_is_refused(make: TokenizerMaker) -> None:
    with pytest.raises(TokenizerError, match="add_bos_token is set, but there is no bos_token"):
        make(add_bos_token=True)


def test_special_ids_come_from_all_the_files(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path,
        train_byte_level(STARCODER),
        bos_token={"content": "<|endoftext|>", "special": True},
        eos_token=None,
        additional_special_tokens=["def"],
    )
    (folder / "special_tokens_map.json").write_text(
        '{"eos_token": "<fim_pad>", "pad_token": {"content": "<file_sep>"}}'
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 6]}')
    tokenizer = Tokenizer.from_directory(folder)
    assert (tokenizer.bos_id, tokenizer.pad_id) == (0, 5)
    assert tokenizer.eos_ids == {0, 4, 6}
    assert tokenizer.id_of("def") in tokenizer.special_ids


@pytest.mark.parametrize(("stated", "expected"), [("7", {7}), ("[7, 8]", {7, 8}), ("null", {3})])
def test_end_ids_of_the_generation_config(tmp_path: Path, stated: str, expected: set[int]) -> None:
    folder = write_checkpoint(tmp_path, train_byte_level(STARCODER))
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {stated}}}')
    (folder / "config.json").write_text('{"eos_token_id": 3}')
    assert Tokenizer.from_directory(folder).eos_ids == expected


@pytest.mark.parametrize("stated", ['"7"', "[7, null]", "true", "1.5", '{"id": 7}', "[[7]]", "1" + "0" * 30])
def test_end_ids_of_the_wrong_type_are_refused_by_name(tmp_path: Path, stated: str) -> None:
    folder = write_checkpoint(tmp_path, train_byte_level(STARCODER, size=300))
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {stated}}}')
    expected = rf"^{folder}/generation_config\.json: 'eos_token_id' is .*; expected a token id or a list of them"
    with pytest.raises(TokenizerError, match=expected):
        Tokenizer.from_directory(folder)


def test_chat_template_sources(make: TokenizerMaker, tmp_path: Path) -> None:
    assert make().chat_template is None
    assert make(chat_template="one").chat_template == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert make(chat_template=named).chat_template == "three"
    folder = write_checkpoint(tmp_path / "jinja", train_byte_level(STARCODER), chat_template="config")
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(folder).chat_template == "file"


def test_vocab_and_merges_files(tmp_path: Path) -> None:
    backend = train_byte_level(["<|endoftext|>"], digits=False)
    backend.model.save(str(tmp_path))
    size = backend.get_vocab_size()
    added = {size: {"content": "<|im_start|>", "special": True}, size + 1: {"content": "<tool>", "special": False}}
    config = {"eos_token": "<|endoftext|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in SAMPLES:
        assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.eos_ids == {0}
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.encode("<|im_start|>", allow_special=True) == [size]
    assert tokenizer.encode("<tool>") == [size + 1]


def test_added_tokens_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, train_byte_level(STARCODER), added_tokens_decoder={"999": {"content": "<new>"}})
    with pytest.raises(TokenizerError, match="'<new>' should have id 999"):
        Tokenizer.from_directory(folder)


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = train_byte_level(STARCODER)
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.from_directory(write_checkpoint(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]


def test_sentencepiece_space_belongs_to_the_start_of_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_checkpoint(tmp_path, llama_json()))
    start = tokenizer.encode("def", add_special=False)
    assert [tokenizer.spelling(i) for i in start] == ["▁def"]
    assert tokenizer.decode(start) == "def"
    assert tokenizer.decode(start, continuation=True) == " def"
    inner = tokenizer.encode("def", add_special=False, continuation=True)
    assert [tokenizer.spelling(i) for i in inner] == ["de", "f"]
    assert tokenizer.decode(tokenizer.encode("  def é\n")) == "  def é\n"


def test_metaspace_first_scheme(tmp_path: Path) -> None:
    backend = llama_json()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = Tokenizer.from_directory(write_checkpoint(tmp_path, backend))
    assert not tokenizer.prefixes_after_special
    assert tokenizer.spelling(tokenizer.encode("def", add_special=False)[0]) == "▁def"
    assert tokenizer.spelling(tokenizer.encode("def", add_special=False, continuation=True)[0]) == "de"


def test_text_that_is_not_unicode_is_refused(shared: Tokenizer) -> None:
    with pytest.raises(PromptError, match="valid Unicode"):
        shared.encode("a\ud800")


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer; expected tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_vocabulary_without_bytes_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match=r"neither byte-level nor SentencePiece \(decoder: WordPiece\)"):
        Tokenizer.from_directory(write_checkpoint(tmp_path, backend))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"model": 3}', "[" * 100_000, '{"model": {"type": "BPE"}}']
)
def test_damaged_tokenizer_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe{}", b"[" * 100_000])
def test_damaged_side_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_checkpoint(tmp_path, train_byte_level(STARCODER, size=300))
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        Tokenizer.from_directory(folder)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "generation_config.json", "chat_template.jinja",
    ],
)  # fmt: skip
def test_a_file_that_may_not_be_read_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = write_checkpoint(tmp_path, train_byte_level(STARCODER, size=300))
    if name in ("tokenizer.model", "vocab.json", "merges.txt"):
        (folder / "tokenizer.json").unlink()
    for part in ("vocab.json", "merges.txt") if name in ("vocab.json", "merges.txt") else (name,):
        (folder / part).touch()
    read = Path.read_bytes

    def denied(path: Path) -> bytes:  # what a user without the permission gets; the tests may run as root
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_directory(folder)
    assert str(caught.value) == f"{folder / name}: cannot be read (Permission denied); make it readable."


def test_mutated_tokenizer_json_never_fails_otherwise(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, train_byte_level(STARCODER, size=300), eos_token="<|endoftext|>")
    file = tmp_path / "tokenizer.json"
    good = file.read_bytes()
    rng = random.Random(0)
    refused = 0
    for round_ in range(200):
        data = bytearray(good[: rng.randrange(len(good))] if round_ % 3 == 0 else good)
        for _ in range(rng.randint(0 if round_ % 3 == 0 else 1, 4)):
            data[rng.randrange(len(data))] = rng.choice(b'{}[]",:0-9aneulltr\x00\xff')
        file.write_bytes(data)
        try:
            tokenizer = Tokenizer.from_directory(tmp_path)
            tokenizer.decode(tokenizer.encode("def f(x): <fim_prefix>"))
        except TokenizerError:
            refused += 1
    assert refused > 60
