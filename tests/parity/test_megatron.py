"""BigCode Megatron checkpoints, split over ranks as Megatron splits them, against the same model in transformers."""

from __future__ import annotations

import argparse
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from writehead import build, kernels
from writehead.errors import CheckpointError, ConfigError
from writehead.models.megatron import hf_config

WIDTH, HEADS, LAYERS, VOCAB, POSITIONS = 32, 4, 4, 72, 24
Tree = dict[str, Any]


class PositionEmbeddingType(Enum):
    """Megatron's."""

    rotary = 1
    absolute = 2
    alibi = 3


PositionEmbeddingType.__module__ = "megatron.model.enums"


def tiny(**keys: Any) -> Any:
    """A model with weights large enough that every one of them matters."""
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
    config = transformers.GPTBigCodeConfig(**sizes, bos_token_id=None, eos_token_id=None, **keys)
    model = transformers.GPTBigCodeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    return model.eval()


def arguments(model: Any, tensor: int, pipeline: int, **changes: Any) -> argparse.Namespace:
    """What such a run keeps of its command line: what shapes the model, and some of the hundreds that do not."""
    config = model.config
    given: dict[str, Any] = {
        "hidden_size": config.n_embd, "num_layers": config.n_layer, "num_attention_heads": config.n_head,
        "max_position_embeddings": config.n_positions, "ffn_hidden_size": 4 * config.n_embd,
        "kv_channels": WIDTH // HEADS, "padded_vocab_size": config.vocab_size,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "attention_head_type": "multiquery" if config.multi_query else "multihead", "position_embedding_type": None,
        "bias_gelu_fusion": True, "openai_gelu": False, "onnx_safe": None, "add_bias_linear": True, "num_experts": None,
        "add_position_embedding": True, "use_rotary_position_embeddings": False, "swiglu": False,
        "glu_activation": None, "squared_relu": False, "untie_embeddings_and_output_weights": False,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True, "seq_length": 24, "lr": 3e-4,
        "params_dtype": torch.float16, "data_path": ["a", "b"], "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
    }  # fmt: skip
    return argparse.Namespace(**given | changes)


def layer_tensors(state: dict[str, Tensor], layer: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """One layer as one tensor rank holds it: columns of the first products, rows of the second ones."""
    source = {k.removeprefix(f"transformer.h.{layer}."): v for k, v in state.items() if f".h.{layer}." in k}
    qkv = {part: source[f"attn.c_attn.{part}"] for part in ("weight", "bias")}
    found: dict[str, Tensor] = {}
    for part in ("weight", "bias"):
        if len(qkv[part]) == 3 * WIDTH:  # multi-head: HF's rows are Megatron's, head by head
            found[f"self_attention.query_key_value.{part}"] = qkv[part].chunk(ranks)[rank]
        else:
            found[f"self_attention.query.{part}"] = qkv[part][:WIDTH].chunk(ranks)[rank]
            found[f"self_attention.key_value.{part}"] = qkv[part][WIDTH:]
        found[f"input_layernorm.{part}"] = source[f"ln_1.{part}"]
        found[f"post_attention_layernorm.{part}"] = source[f"ln_2.{part}"]
        found[f"mlp.dense_h_to_4h.{part}"] = source[f"mlp.c_fc.{part}"].chunk(ranks)[rank]
    for theirs, ours in {"self_attention.dense": "attn.c_proj", "mlp.dense_4h_to_h": "mlp.c_proj"}.items():
        found[f"{theirs}.weight"] = source[f"{ours}.weight"].chunk(ranks, dim=1)[rank]
        found[f"{theirs}.bias"] = source[f"{ours}.bias"]
    return {f"layers.{layer}.{name}": tensor.clone() for name, tensor in found.items()}


def language_model(model: Any, rank: int, ranks: int, stage: int, stages: int) -> Tree:
    """The state of one rank: its part of the layers, counted from 0; embeddings first, the last norm last."""
    state = model.state_dict()
    each = LAYERS // stages
    encoder: dict[str, Tensor] = {}
    for local in range(each):
        for name, tensor in layer_tensors(state, stage * each + local, rank, ranks).items():
            encoder[name.replace(f"layers.{stage * each + local}.", f"layers.{local}.")] = tensor
    tree: Tree = {"encoder": encoder}
    if stage == 0:
        tree["embedding"] = {
            "word_embeddings": {"weight": state["transformer.wte.weight"].chunk(ranks)[rank].clone()},
            "position_embeddings": {"weight": state["transformer.wpe.weight"]},
        }
    if stage == stages - 1:
        encoder |= {f"final_layernorm.{part}": state[f"transformer.ln_f.{part}"] for part in ("weight", "bias")}
        if not model.config.tie_word_embeddings:
            tree["output_layer"] = {"weight": state["lm_head.weight"].chunk(ranks)[rank].clone()}
    return tree


def save(root: Path, model: Any, *, tensor: int = 1, pipeline: int = 1, **changes: Any) -> Path:
    """Megatron's directory: a tracker file, an iteration, a file for each rank."""
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    args = arguments(model, tensor, pipeline, **changes)
    for rank in range(tensor):
        for stage in range(pipeline):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            folder = root / "iter_0000030" / name
            folder.mkdir(parents=True)
            content = {"language_model": language_model(model, rank, tensor, stage, pipeline)}
            if stage == pipeline - 1 and pipeline > 1:  # the last stage's copy of the tied embedding
                content["word_embeddings_for_head"] = {
                    "weight": model.transformer.wte.weight.detach().chunk(tensor)[rank]
                }
            torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 30, "model": content},
                       folder / "model_optim_rng.pt")  # fmt: skip
    return root


def load(path: Path) -> Any:
    return build.build(build.open_source(path), weights="fp32", kernels=kernels.load("reference"))


def assert_same_logits(path: Path, model: Any) -> None:
    ids = torch.randint(0, VOCAB, (2, POSITIONS))
    with torch.no_grad():
        expected, actual = model(ids).logits, load(path)(ids)
    worst = float((actual - expected).abs().max() / (expected.max() - expected.min()))
    print(f"largest difference relative to the range of the logits: {worst:.1e}")
    assert worst <= 2e-5


@pytest.mark.parametrize("multi_query", [True, False])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
def test_ranks_merge_to_the_model(tmp_path: Path, multi_query: bool, tensor: int, pipeline: int) -> None:
    model = tiny(multi_query=multi_query)
    assert_same_logits(save(tmp_path, model, tensor=tensor, pipeline=pipeline), model)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)])
def test_an_untied_head_is_read_from_the_last_stage(tmp_path: Path, tensor: int, pipeline: int) -> None:
    model = tiny(tie_word_embeddings=False)
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    path = save(tmp_path, model, tensor=tensor, pipeline=pipeline, untie_embeddings_and_output_weights=True)
    assert_same_logits(path, model)


@pytest.mark.parametrize(
    ("flags", "activation"),
    [
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_new"),
        ({"openai_gelu": True}, "gelu_new"),
    ],
)
def test_the_flags_choose_the_gelu(tmp_path: Path, flags: dict[str, bool], activation: str) -> None:
    model = tiny(activation_function=activation)
    assert_same_logits(save(tmp_path, model, **flags), model)


def test_the_enum_of_position_embeddings_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron pickles a member of its own enum among the arguments."""
    for name in ("megatron", "megatron.model", "megatron.model.enums"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(
        sys.modules["megatron.model.enums"], "PositionEmbeddingType", PositionEmbeddingType, raising=False
    )
    model = tiny()
    (tmp_path / "absolute").mkdir()
    (tmp_path / "alibi").mkdir()
    absolute = save(tmp_path / "absolute", model, position_embedding_type=PositionEmbeddingType.absolute)
    alibi = save(tmp_path / "alibi", model, position_embedding_type=PositionEmbeddingType.alibi)
    monkeypatch.undo()
    assert_same_logits(absolute, model)
    with pytest.raises(ConfigError, match="position_embedding_type"):
        build.open_source(alibi)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("use_rotary_position_embeddings", True),
        ("add_position_embedding", False),
        ("swiglu", True),
        ("glu_activation", "geglu"),
        ("squared_relu", True),
        ("num_experts", 8),
        ("add_bias_linear", False),
        ("apply_layernorm_1p", True),
        ("apply_residual_connection_post_layernorm", True),
        ("kv_channels", 16),
        ("attention_head_type", "grouped"),
        ("hidden_size", None),
        ("padded_vocab_size", "many"),
        ("num_attention_heads", 0),
    ],
)
def test_another_kind_of_model_is_refused_by_name(argument: str, value: object) -> None:
    with pytest.raises(ConfigError, match=argument):
        hf_config(vars(arguments(tiny(), 1, 1, **{argument: value})))


def test_the_end_token_is_left_to_the_tokenizer(tmp_path: Path) -> None:
    source = build.open_source(save(tmp_path, tiny()))
    assert (source.config.bos_id, source.config.eos_ids) == (None, ())


def test_arguments_that_contradict_the_tensors_list_them(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"position_embeddings\.weight' is \[24, 32\], expected \[48, 32\]"):
        load(save(tmp_path, tiny(), max_position_embeddings=48))
