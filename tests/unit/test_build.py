"""What `build` accepts and refuses when config, tokenizer and weights meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from tests.models import NUM_ROWS, write_tiny_model
from writehead import LLM, SamplingParams
from writehead.build import load_tokenizer, open_source
from writehead.errors import CheckpointError, PromptError, TokenizerError

GREEDY = SamplingParams(temperature=0, max_tokens=6, min_tokens=2)


def test_tokens_added_past_the_models_rows_are_never_used(tmp_path: Path) -> None:
    """As in Code Llama 34B and fine-tunes with a padding token of their own."""
    expected = LLM(write_tiny_model(tmp_path)).generate("def f(x):", GREEDY)[0].outputs[0].token_ids
    file = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([f"<extra_{i}>" for i in range(20)])
    assert tokenizer.get_vocab_size() > NUM_ROWS
    tokenizer.save(str(file))
    llm = LLM(tmp_path)
    assert llm.generate("def f(x):", GREEDY)[0].outputs[0].token_ids == expected
    with pytest.raises(PromptError, match=f"has the token id {NUM_ROWS}; the vocabulary has 0 to {NUM_ROWS - 1}"):
        llm.generate([[1, NUM_ROWS]], GREEDY)


def test_fim_tokens_without_rows_are_no_fill_in_the_middle(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    text = file.read_text("utf-8").replace("<fim_", "<xim_")
    file.write_text(text, encoding="utf-8")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    fillers = [f"<extra_{i}>" for i in range(10)]
    tokenizer.add_special_tokens([*fillers, "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"])
    tokenizer.save(str(file))
    llm = LLM(tmp_path)
    assert llm.fim is None
    with pytest.raises(PromptError, match="no fill-in-the-middle tokens"):
        llm.generate({"prompt": "a", "suffix": "b"}, GREEDY)


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    content["model"]["vocab"] |= {f"token{i}": 1000 + i for i in range(3)}
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TokenizerError, match=f"has 1003 tokens but the model only {NUM_ROWS}; use the tokenizer that"):
        load_tokenizer(open_source(tmp_path))


def test_weights_without_a_config_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing or empty; the weights beside it cannot be"):
        open_source(tmp_path)
