"""The tokenizer of a model trained from nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from writehead.train.vocabulary import SPECIAL_TOKENS, encode_text, encode_texts, train_tokenizer

TEXTS = ["def f(self):\n        return self.x\n" * 20, "for i in range(10):\n    print(i, 123)\n" * 20]
TOKENIZER = train_tokenizer(TEXTS, vocab_size=290)


def test_layout() -> None:
    assert TOKENIZER.get_vocab_size() == 290
    assert [TOKENIZER.token_to_id(t) for t in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert TOKENIZER.encode("123").tokens == ["1", "2", "3"]
    assert TOKENIZER.encode("\n        return").tokens == ["Ċ" + "Ġ" * 7, "Ġret", "urn"]


def test_training_is_deterministic() -> None:
    assert train_tokenizer(TEXTS, vocab_size=290).to_str() == TOKENIZER.to_str()


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_text_that_spells_a_special_token_stays_text(name: str) -> None:
    ids = encode_text(TOKENIZER, f"a {name} b")
    assert min(ids) > 4
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == f"a {name} b"


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    ids = encode_text(TOKENIZER, text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_each_text_is_encoded_alone() -> None:
    parts = ["self", ".x\n", ""]
    assert encode_texts(TOKENIZER, parts) == [encode_text(TOKENIZER, p) for p in parts]
    assert encode_texts(Tokenizer.from_str(TOKENIZER.to_str()), parts) == encode_texts(TOKENIZER, parts)
