"""`verify` on tiny checkpoints: everything passes when it is right, and some row fails for each way to be wrong."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from writehead import build as building
from writehead.checkpoint.rules import Rule, Same
from writehead.errors import MissingDependencyError, PromptError, TokenizerError, UsageError, VerificationError
from writehead.kernels import CacheView, reference
from writehead.models.decoder import Decoder
from writehead.verify import Report, Row, comparisons, oracle, subject, verify

ROWS = ["logits", "cached decoding", "ragged batch", "greedy tokens", "cached = uncached", "ragged = single"]
ROWS += ["queries = broadcast", "queries = tiled", "broadcast = tiled"]
VOCAB = 320
BIGCODE = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 96}
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 96, "tie_word_embeddings": False,
}  # fmt: skip


def save_random(directory: Path, name: str, values: dict[str, Any]) -> Path:
    """A transformers model of random weights, large enough that every part of it shows in the logits."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def save_santacoder(directory: Path, bigcode: Path) -> Path:
    """The same weights in the original form: Conv1D, q and kv apart, GPT-2's name."""
    width = BIGCODE["n_embd"]
    state: dict[str, torch.Tensor] = {}
    for key, value in load_file(bigcode / "model.safetensors").items():
        if ".c_attn." in key:
            state[key.replace("c_attn", "q_attn")] = value[:width].t().contiguous()
            state[key.replace("c_attn", "kv_attn")] = value[width:].t().contiguous()
        elif value.dim() == 2 and ".h." in key:
            state[key] = value.t().contiguous()
        elif key != "lm_head.weight":
            state[key] = value
    directory.mkdir()
    save_file(state, directory / "model.safetensors")
    config = {**BIGCODE, "model_type": "gpt2", "architectures": ["GPT2LMHeadCustomModel"]}
    config |= {"attention_head_type": "multiquery", "activation_function": "gelu_fast"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_gguf(path: Path, bigcode: Path) -> Path:
    """The same weights as llama.cpp stores StarCoder: an architecture that transformers does not read."""
    names = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "ln_1": "attn_norm"}
    names |= {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
    names |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "transformer.": "", "h.": "blk."}
    writer = gguf.GGUFWriter(path, "starcoder")
    writer.add_context_length(BIGCODE["n_positions"])
    writer.add_embedding_length(BIGCODE["n_embd"])
    writer.add_feed_forward_length(BIGCODE["n_inner"])
    writer.add_block_count(BIGCODE["n_layer"])
    writer.add_head_count(BIGCODE["n_head"])
    writer.add_head_count_kv(1)
    writer.add_layer_norm_eps(1e-5)
    for key, value in load_file(bigcode / "model.safetensors").items():
        for theirs, ours in names.items():
            key = key.replace(theirs, ours)
        if key != "lm_head.weight":
            writer.add_tensor(key, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(directory: Path, *, digits: bool) -> None:
    """A byte-level tokenizer of 256 tokens and a few merges; `digits` splits numbers as BigCode's do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("d", "e"), ("de", "f"), ("1", "2"), ("3", "4"), ("12", "34")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def bigcode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = save_random(tmp_path_factory.mktemp("bigcode"), "gpt_bigcode", BIGCODE)
    add_tokenizer(path, digits=True)
    return path


@pytest.fixture(scope="module")
def santacoder(bigcode: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_santacoder(tmp_path_factory.mktemp("parent") / "santacoder", bigcode)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    return save_random(tmp_path_factory.mktemp("llama"), "llama", LLAMA)


def failing(report: Report) -> set[str]:
    return {row.name for row in report.rows if not row.passed}


def damage(monkeypatch: pytest.MonkeyPatch, change: Callable[[Decoder], None]) -> None:
    """Change our copy of the weights after loading."""

    def build(*args: Any, **options: Any) -> Decoder:
        decoder = building.build(*args, **options)
        with torch.no_grad():
            change(decoder)
        return decoder

    monkeypatch.setattr(comparisons, "build", build)


class TestPasses:
    def test_multi_query(self, bigcode: Path) -> None:
        report = verify(bigcode, max_new_tokens=8)
        assert [row.name for row in report.rows] == [*ROWS, "tokenizer"]
        assert report.passed
        report.raise_if_failed()
        assert "reading the files itself" in report.oracle
        assert all(0 <= row.relative <= 2e-5 for row in report.rows)
        assert "24 tokens, the same choices" in report.rows[3].detail

    def test_grouped_query_with_an_untied_head(self, llama: Path) -> None:
        report = verify(llama, max_new_tokens=8)
        assert [row.name for row in report.rows] == ROWS  # random ids: there is no tokenizer
        assert report.passed

    def test_original_santacoder(self, santacoder: Path) -> None:
        report = verify(santacoder, max_new_tokens=8)
        assert report.passed
        assert "multi-head GPT-2" in report.oracle

    def test_a_format_that_transformers_cannot_read(self, bigcode: Path, tmp_path: Path) -> None:
        report = verify(save_gguf(tmp_path / "model.gguf", bigcode), max_new_tokens=8)
        assert report.passed
        assert "weights converted by writehead" in report.oracle

    def test_multi_head_has_nothing_to_tile(self, tmp_path: Path) -> None:
        report = verify(save_random(tmp_path, "gpt_bigcode", {**BIGCODE, "multi_query": False}), max_new_tokens=4)
        assert report.passed
        assert [row.name for row in report.rows] == ROWS[:-2]

    def test_a_single_file_and_prompts_of_the_user(self, bigcode: Path) -> None:
        report = verify(bigcode / "model.safetensors", prompts=["def f(x):"], max_new_tokens=4)
        assert report.passed
        assert "tensors read by writehead" in report.oracle
        # "def" is one token, so 7 of prompt and 4 new ones; and half of that
        assert report.rows[0].detail == "2 sequences, 17 tokens, each at once"

    def test_16_bits_have_a_tolerance_of_their_own(self, llama: Path) -> None:
        report = verify(llama, weights="bf16", max_new_tokens=4)
        assert report.passed
        assert report.rows[0].tolerance == 4e-2
        assert report.rows[0].relative > 2e-5  # really computed in 16 bits

    def test_transformers_state_is_left_as_it_was(self, llama: Path) -> None:
        from transformers.utils import logging

        before = logging.get_verbosity(), sys.stderr
        verify(llama, max_new_tokens=1)
        assert (logging.get_verbosity(), sys.stderr) == before

    def test_nothing_is_printed(self, bigcode: Path, capfd: pytest.CaptureFixture[str]) -> None:
        verify(bigcode, max_new_tokens=1)
        assert capfd.readouterr() == ("", "")


class TestFails:
    def test_one_wrong_weight(self, bigcode: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def change(decoder: Decoder) -> None:
            decoder.get_parameter("layers.1.mlp.down.weight")[3, 5] += 0.05

        damage(monkeypatch, change)
        report = verify(bigcode, max_new_tokens=4, kernels="reference")
        assert {"logits", "cached decoding", "ragged batch"} <= failing(report)
        assert not {"cached = uncached", "queries = broadcast", "queries = tiled"} & failing(report)
        with pytest.raises(VerificationError, match=r"of 10 comparisons failed \(logits: .* where 2e-05 is allowed"):
            report.raise_if_failed()

    @pytest.mark.parametrize("model", ["bigcode", "llama", "santacoder"])
    def test_swapped_keys_and_values(
        self, model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def change(decoder: Decoder) -> None:
            weight = decoder.get_parameter("layers.0.attn.qkv.weight")
            start, size = decoder.config.q_size, decoder.config.kv_size
            weight[start:] = torch.cat([weight[start + size :], weight[start : start + size]])

        damage(monkeypatch, change)
        assert {"logits", "ragged batch"} <= failing(
            verify(request.getfixturevalue(model), max_new_tokens=4, kernels="reference")
        )

    def test_swapped_queries_and_keys(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def change(decoder: Decoder) -> None:
            weight, size = decoder.get_parameter("layers.0.attn.qkv.weight"), decoder.config.kv_size
            first, key = weight[:size].clone(), slice(decoder.config.q_size, decoder.config.q_size + size)
            weight[:size] = weight[key]
            weight[key] = first

        damage(monkeypatch, change)
        assert {"logits", "cached decoding"} <= failing(verify(llama, max_new_tokens=4, kernels="reference"))

    def test_the_wrong_gelu(self, bigcode: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def open_source(*args: Any, **options: Any) -> building.ModelSource:
            source = building.open_source(*args, **options)
            assert source.config.activation == "gelu_tanh"
            return replace(source, config=replace(source.config, activation="gelu"))

        monkeypatch.setattr(comparisons, "open_source", open_source)
        assert {"logits", "cached decoding", "ragged batch"} <= failing(
            verify(bigcode, max_new_tokens=4, kernels="reference")
        )

    def test_a_weight_rule_that_forgets_to_transpose(self, santacoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def open_source(*args: Any, **options: Any) -> building.ModelSource:
            source = building.open_source(*args, **options)
            rules = tuple(_square_as_is(rule) for rule in source.rules.rules)
            return replace(source, rules=replace(source.rules, rules=rules))

        monkeypatch.setattr(comparisons, "open_source", open_source)
        assert {"logits", "cached decoding", "ragged batch"} <= failing(
            verify(santacoder, max_new_tokens=4, kernels="reference")
        )

    def test_a_cache_that_stores_in_the_wrong_place(self, bigcode: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = reference.ReferenceKernels.store

        def shifted(self: reference.ReferenceKernels, cache: Any, layer: int, k: Any, v: Any) -> None:
            store(self, cache, layer, k, torch.zeros_like(v) if len(cache.slots) == 1 else v)

        monkeypatch.setattr(reference.ReferenceKernels, "store", shifted)
        wrong = failing(verify(bigcode, max_new_tokens=4, kernels="reference"))
        assert {"cached decoding", "cached = uncached", "ragged = single"} <= wrong
        assert "logits" not in wrong

    def test_a_batch_that_reads_past_the_end_of_a_sequence(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        attend = reference.ReferenceKernels.cached_attention

        def longest(self: reference.ReferenceKernels, q: Any, cache: CacheView, *rest: Any) -> torch.Tensor:
            groups = tuple(replace(g, lengths=(max(g.lengths),) * len(g.lengths)) for g in cache.groups)
            return attend(self, q, replace(cache, groups=groups), *rest)

        monkeypatch.setattr(reference.ReferenceKernels, "cached_attention", longest)
        wrong = failing(verify(llama, max_new_tokens=4, kernels="reference"))
        assert {"ragged batch", "ragged = single"} <= wrong
        assert not {"logits", "cached = uncached"} & wrong

    def test_one_mqa_computation(self, bigcode: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        broadcast = reference.broadcast_heads

        def scaled(*args: Any) -> torch.Tensor:
            return broadcast(*args) * 1.01

        monkeypatch.setattr(reference, "broadcast_heads", scaled)
        assert failing(verify(bigcode, max_new_tokens=4, kernels="reference")) == {
            "queries = broadcast",
            "broadcast = tiled",
        }

    def test_heads_tiled_in_the_wrong_order(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def tile(qkv: torch.Tensor, config: Any) -> torch.Tensor:
            q, k, v = qkv.split((config.q_size, config.kv_size, config.kv_size))
            return torch.cat([q, k, k, v, v])

        monkeypatch.setattr(subject, "_tile", tile)
        assert failing(verify(llama, max_new_tokens=4, kernels="reference")) == {"queries = tiled", "broadcast = tiled"}

    def test_nans(self, bigcode: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def change(decoder: Decoder) -> None:
            decoder.get_parameter("norm.bias").fill_(math.nan)

        damage(monkeypatch, change)
        report = verify(bigcode, max_new_tokens=2)
        assert failing(report) == set(ROWS)
        assert "NaN" in report.rows[0].detail
        assert report.rows[3].detail == "prompt 0 ended after 0 of 2 tokens: our logits are not finite"

    def test_other_ids_than_the_file_says(self, bigcode: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        load = building.load_tokenizer

        def reversing(source: building.ModelSource) -> Any:
            tokenizer = load(source)
            encode = tokenizer.encode
            tokenizer.encode = lambda text, **options: encode(text, **options)[::-1]  # type: ignore[method-assign]
            return tokenizer

        monkeypatch.setattr(comparisons, "load_tokenizer", reversing)
        assert failing(verify(bigcode, max_new_tokens=2)) == {"tokenizer"}


def _square_as_is(rule: Rule) -> Rule:
    return replace(rule, layout=Same()) if rule.target.endswith("attn.out.weight") else rule


class TestGreedy:
    """Logits of a text of 3 tokens, the last 2 of them generated, over a vocabulary of 3."""

    TEXT = ([[0, 1, 2]], [1])

    @staticmethod
    def row(second: list[float]) -> Row:
        logits = torch.tensor([[0.0, 10.0, 0.0], second, [0.0, 0.0, 0.0]])
        return comparisons.greedy_row(*TestGreedy.TEXT, [logits], num_new=2, tolerance=1e-4)

    def test_same(self) -> None:
        row = self.row([0.0, 3.0, 3.5])
        assert (row.difference, row.passed, row.detail) == (0.0, True, "2 tokens, the same choices")

    def test_a_tie_within_the_tolerance_passes_and_says_so(self) -> None:
        row = self.row([0.0, 3.5005, 3.5])
        assert row.passed
        assert row.relative == pytest.approx(5e-5, rel=1e-2)
        assert "prompt 0 at token 1 by 5e-05 of the range" in row.detail
        assert "ties within rounding" in row.detail

    def test_another_choice_fails(self) -> None:
        row = self.row([0.0, 4.5, 3.5])
        assert not row.passed
        assert row.relative == pytest.approx(0.1)
        assert "(not a tie)" in row.detail

    def test_nan_fails(self) -> None:
        assert not self.row([0.0, math.nan, 3.5]).passed


class TestTokenizer:
    def test_transformers_agrees(self, bigcode: Path) -> None:
        row = verify(bigcode, max_new_tokens=1).rows[-1]
        assert row.passed
        assert row.detail.startswith("ids of 6 texts against tokenizers on tokenizer.json; transformers' ")
        assert row.detail.endswith(" agrees")

    @pytest.mark.parametrize(
        ("encode", "opinion"),
        [
            (lambda text, **_: [len(text)], "transformers' Wrong disagrees on 6 (information only"),
            (None, "transformers' TypeError kept its tokenizer from loading (information only)"),
        ],
    )
    def test_transformers_disagreement_is_information(
        self, bigcode: Path, monkeypatch: pytest.MonkeyPatch, encode: Any, opinion: str
    ) -> None:
        import transformers

        wrong = type("Wrong", (), {"encode": staticmethod(encode) if encode else None})
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: wrong())
        row = verify(bigcode, max_new_tokens=1).rows[-1]
        assert row.passed
        assert opinion in row.detail

    def test_a_vocabulary_without_tokenizer_json_must_survive_decoding(self, bigcode: Path, tmp_path: Path) -> None:
        spec = json.loads((bigcode / "tokenizer.json").read_text())["model"]
        shutil.copytree(bigcode, tmp_path, dirs_exist_ok=True, ignore=lambda *_: ["tokenizer.json"])
        (tmp_path / "vocab.json").write_text(json.dumps(spec["vocab"]))
        (tmp_path / "merges.txt").write_text("\n".join(" ".join(m) for m in spec["merges"]))
        row = verify(tmp_path, max_new_tokens=1).rows[-1]
        assert (row.name, row.passed) == ("tokenizer", True)
        assert row.detail.startswith("6 texts encoded and decoded")


class TestRefuses:
    def test_without_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'writehead\[hf\]'"):
            verify("no/such/model")

    def test_a_checkpoint_that_transformers_cannot_load(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("size\nmismatch")

        monkeypatch.setattr(oracle, "_from_files", broken)
        with pytest.raises(VerificationError, match=r"cannot load this checkpoint .*\(RuntimeError: size mismatch\)"):
            verify(llama)

    def test_weights_that_transformers_would_make_up(self) -> None:
        with pytest.raises(VerificationError, match=r"no fitting weights in this checkpoint for a, b"):
            oracle._complete(None, {"missing_keys": {"b"}, "mismatched_keys": {"a"}})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tolerance": -1.0}, "tolerance is -1.0"),
            ({"tolerance": math.nan}, "tolerance is nan"),
            ({"max_new_tokens": 0}, "max_new_tokens 0"),
            ({"max_new_tokens": 96}, "max_new_tokens is 96; the model has 96 positions"),
            ({"weights": "int3"}, "'int3' is not a format"),
        ],
    )
    def test_settings_that_cannot_work(self, llama: Path, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            verify(llama, **options)

    @pytest.mark.parametrize(
        ("prompts", "lengths"), [([], r"\[\]"), (["", "ab"], r"\[0, 2\]"), (["a" * 65], r"\[65\]")]
    )
    def test_prompts_that_do_not_fit(self, bigcode: Path, prompts: list[str], lengths: str) -> None:
        with pytest.raises(PromptError, match=rf"the prompts have {lengths} tokens; .* of 1 to 64 tokens"):
            verify(bigcode, prompts=prompts)

    def test_text_without_a_tokenizer(self, llama: Path) -> None:
        with pytest.raises(TokenizerError, match="no tokenizer"):
            verify(llama, prompts=["a"])


def test_the_table_names_every_row_and_the_verdict() -> None:
    good = Row(name="logits", difference=1e-6, relative=1e-7, tolerance=2e-5, passed=True, detail="3 sequences")
    bad = replace(good, name="greedy tokens", relative=0.25, passed=False, detail="")
    table = Report(model="m", oracle="transformers", rows=(good, bad)).table().splitlines()
    assert table[0] == "m against transformers"
    assert table[2].split() == ["comparison", "largest", "difference", "relative", "allowed", "result"]
    assert table[3].split() == ["logits", "1e-06", "1e-07", "2e-05", "pass", "3", "sequences"]
    assert table[4].split() == ["greedy", "tokens", "1e-06", "0.25", "2e-05", "FAIL"]
    assert table[-1] == "1 of 2 comparisons FAILED"
    assert table[3].index("pass") == table[4].index("FAIL") == table[2].index("result")
    assert Report(model="m", oracle="o", rows=(good,)).table().endswith("all 1 passed")
