"""Megatron checkpoints: ranks cut from a whole model are merged back to exactly that model."""

from __future__ import annotations

import argparse
import enum
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.checkpoint.corrupt import check_all, mutations
from writehead.checkpoint import Checkpoint, open_checkpoint
from writehead.errors import CheckpointError

WIDTH, HEADS, LAYERS, VOCAB, POSITIONS = 8, 4, 4, 16, 5
HEAD = WIDTH // HEADS
WHOLE = ("layernorm", ".key_value", "dense.bias", "dense_4h_to_h.bias", "position_embeddings")


def whole_model(*, multi_query: bool) -> dict[str, torch.Tensor]:
    """Every logical tensor of a model, in small integers, so that merging is exact."""
    attention = (
        {"query": (WIDTH, WIDTH), "key_value": (2 * HEAD, WIDTH)}
        if multi_query
        else {"query_key_value": (3 * WIDTH, WIDTH)}
    )
    matrices = {f"self_attention.{name}": shape for name, shape in attention.items()} | {
        "self_attention.dense": (WIDTH, WIDTH),
        "mlp.dense_h_to_4h": (4 * WIDTH, WIDTH),
        "mlp.dense_4h_to_h": (WIDTH, 4 * WIDTH),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCAB, WIDTH),
        "embedding.position_embeddings.weight": (POSITIONS, WIDTH),
    }
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"layers.{layer}.{norm}.{part}": (WIDTH,) for part in ("weight", "bias")}
        for name, shape in matrices.items():
            shapes |= {f"layers.{layer}.{name}.weight": shape, f"layers.{layer}.{name}.bias": shape[:1]}
    shapes |= {f"final_layernorm.{part}": (WIDTH,) for part in ("weight", "bias")}
    return {name: torch.randint(-99, 99, shape).to(torch.bfloat16) for name, shape in shapes.items()}


def cut(name: str, tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """What tensor rank `rank` of `size` holds of a tensor."""
    if any(part in name for part in WHOLE):
        return tensor.clone()
    dim = 1 if name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")) else 0
    return tensor.chunk(size, dim)[rank].clone()


def stage_of(name: str, stages: int) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) * stages // LAYERS
    return 0 if name.startswith("embedding.") else stages - 1


def save(
    root: Path,
    model: dict[str, torch.Tensor],
    /,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    old_names: bool = False,
    **extra: Any,
) -> Path:
    """Writes `model` as Megatron would, over tensor x pipeline ranks; `extra` replaces entries of each file."""
    iteration = root / "iter_0000120"
    args = argparse.Namespace(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        num_layers=LAYERS,
        params_dtype=torch.bfloat16,
        data_path=["a", 1],
        lr=1e-4,
    )
    for rank in range(tensor):
        for stage in range(pipeline):
            mine = {n: cut(n, t, tensor, rank) for n, t in model.items() if stage_of(n, pipeline) == stage}
            content = {
                "args": args,
                "checkpoint_version": 3.0,
                "model": {"language_model": language_model(mine, pipeline, stage, old_names)},
                "rng_state": [{"np_rng_state": np.random.get_state(), "random_rng_state": random.getstate()}],
                "optimizer": {"state": {0: torch.zeros(3)}},
            }
            folder = iteration / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(content | extra, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("120")
    return iteration


def language_model(mine: dict[str, torch.Tensor], stages: int, stage: int, old_names: bool) -> dict[str, Any]:
    """Logical names -> Megatron's nested dicts, layers counted within the stage."""
    tree: dict[str, Any] = {}
    encoder: dict[str, torch.Tensor] = {}
    for name, tensor in mine.items():
        parts = name.split(".")
        if parts[0] == "embedding":
            tree.setdefault("embedding", {}).setdefault(parts[1], {})[parts[2]] = tensor
            continue
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) - stage * LAYERS // stages)
        local = ".".join(parts)
        encoder[local.replace("self_attention", "attention") if old_names else local] = tensor
    tree["transformer" if old_names else "encoder"] = encoder
    return tree


def assert_equal(checkpoint: Checkpoint, model: dict[str, torch.Tensor]) -> None:
    assert checkpoint.tensors.keys() == model.keys()
    for name, expected in model.items():
        checkpoint.prefetch(name)
        info = checkpoint.tensors[name]
        assert (info.shape, info.dtype, info.num_bytes) == (tuple(expected.shape), "BF16", expected.nbytes)
        assert torch.equal(checkpoint.read(name), expected), name


@pytest.mark.parametrize("multi_query", [True, False], ids=["mqa", "mha"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (2, 4)])
def test_ranks_merge_to_the_model_that_was_cut(tmp_path: Path, tensor: int, pipeline: int, multi_query: bool) -> None:
    model = whole_model(multi_query=multi_query)
    save(tmp_path, model, tensor=tensor, pipeline=pipeline, old_names=tensor == 2)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "megatron"
        assert checkpoint.path == tmp_path / "iter_0000120"
        assert checkpoint.metadata == {"iteration": "iter_0000120", "checkpoint_version": 3.0}
        assert checkpoint.config == {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "num_layers": LAYERS,
            "params_dtype": "bfloat16",
            "data_path": ["a", 1],
            "lr": 1e-4,
        }
        assert_equal(checkpoint, model)


def test_every_way_to_name_the_checkpoint(tmp_path: Path) -> None:
    model = whole_model(multi_query=True)
    iteration = save(tmp_path, model)
    for path in (tmp_path, iteration, iteration / "mp_rank_00"):
        assert_equal(open_checkpoint(path), model)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert_equal(open_checkpoint(tmp_path), model)
    shutil.copytree(iteration, tmp_path / "iter_0000240")
    with pytest.raises(CheckpointError, match="holds several iterations, name one of them: iter_0000120, iter_0000240"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    iteration.rename(tmp_path / "release")
    assert_equal(open_checkpoint(tmp_path), model)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(CheckpointError, match="expected an iteration number or 'release'"):
        open_checkpoint(tmp_path)


def test_missing_and_surplus_ranks_are_listed(tmp_path: Path) -> None:
    iteration = save(tmp_path, whole_model(multi_query=True), tensor=2, pipeline=2)
    shutil.copytree(iteration / "mp_rank_00_000", iteration / "mp_rank_02_000")
    with pytest.raises(CheckpointError, match="holds ranks beyond 2 x 2: mp_rank_02_000"):
        open_checkpoint(tmp_path)
    shutil.rmtree(iteration / "mp_rank_00_001")
    shutil.rmtree(iteration / "mp_rank_01_000")
    with pytest.raises(
        CheckpointError, match="2 tensor x 2 pipeline ranks, these are missing: mp_rank_00_001, mp_rank_01_000"
    ):
        open_checkpoint(tmp_path)


def edit(path: Path, change: Any) -> None:
    """Loads a rank's file, lets `change` edit its encoder, and saves it."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=False)
    change(content["model"]["language_model"]["encoder"])
    torch.save(content, path)


@pytest.mark.parametrize("name", ["key_value.weight", "input_layernorm.bias", "self_attention.dense.bias"])
def test_replicated_tensors_must_agree(tmp_path: Path, name: str) -> None:
    iteration = save(tmp_path, whole_model(multi_query=True), tensor=2)
    full = next(n for n in open_checkpoint(tmp_path).tensors if n.startswith("layers.1.") and n.endswith(name))
    edit(iteration / "mp_rank_01/model_optim_rng.pt", lambda encoder: encoder[full].add_(200))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"tensor '{full}' must be the same on all tensor ranks"):
        checkpoint.read(full)
    checkpoint.read(full.replace("layers.1", "layers.0"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e: e.update({"layers.0.extra.weight": torch.ones(1)}),
            "not part of a known model: 'layers.0.extra.weight'",
        ),
        (lambda e: e.update({"layers.0.mlp.dense_h_to_4h.bias": torch.ones(3, 3)}), "does not fit together"),
        (lambda e: e.update({"final_layernorm.weight": 1.0}), "is a float, expected a tensor"),
        (lambda e: e.update({"layers.0.attention.dense.bias": torch.ones(8)}), "is there in two spellings"),
        (lambda e: e.update({f"layers.9.{n}": e[f"layers.0.{n}"] for n in ("input_layernorm.bias",)}), "with gaps"),
        (lambda e: e.update({"loop": e}), "is not made of names"),
        (lambda e: e.update({7: torch.ones(1)}), "is not made of names"),
    ],
)
def test_damaged_ranks_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    iteration = save(tmp_path, whole_model(multi_query=True), tensor=2)
    for rank in (0, 1) if "fit" not in message else (1,):
        edit(iteration / f"mp_rank_0{rank}/model_optim_rng.pt", change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"checkpoint_version": 1.0}, "has a checkpoint_version below 2, or none"),
        ({"checkpoint_version": None}, "has a checkpoint_version below 2, or none"),
        ({"args": {"num_layers": 1}}, "has no 'args' of a training run"),
        ({"args": argparse.Namespace(tensor_model_parallel_size=0)}, "'tensor_model_parallel_size' must be a number"),
        ({"model": {"state_dict": {}}}, "has no model.language_model"),
        ({"model0": {}}, "interleaved pipeline stages are not supported"),
        ({"extra": Path("x")}, "asks for the Python object 'pathlib"),
    ],
)
def test_other_programs_files_are_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    save(tmp_path, whole_model(multi_query=True), **extra)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("by", ["value", "name"])
def test_enums_of_megatron_are_read_without_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Most versions of Python pickle a member as its class and value, 3.11.0 to 3.11.3 as its class and name."""
    module = ModuleType("megatron.model.enums")
    embedding = enum.Enum("embedding", {"rotary": 1, "absolute": 2}, module=module.__name__)
    embedding.__name__ = embedding.__qualname__ = "PositionEmbeddingType"
    module.__dict__["PositionEmbeddingType"] = embedding
    forms: dict[str, Any] = {
        "value": lambda self, _: (embedding, (self.value,)),
        "name": lambda self, _: (getattr, (embedding, self.name)),
    }
    monkeypatch.setattr(embedding, "__reduce_ex__", forms[by])
    args = argparse.Namespace(position_embedding_type=embedding["absolute"])
    with monkeypatch.context() as patch:
        for name in ("megatron", "megatron.model"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        save(tmp_path, whole_model(multi_query=True), args=args)
    assert open_checkpoint(tmp_path).config == {"position_embedding_type": 2 if by == "value" else "absolute"}


class Attribute:
    """Pickles as the attribute of something that is no enum."""

    def __init__(self, of: object, name: object) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, tuple[object, object]]:
        return getattr, (self.of, self.name)


@pytest.mark.parametrize(("of", "name"), [("text", "upper"), (torch.float32, "itemsize")])
def test_other_attributes_are_refused(tmp_path: Path, of: object, name: str) -> None:
    save(tmp_path, whole_model(multi_query=True), extra=Attribute(of, name))
    with pytest.raises(CheckpointError, match=f"getattr of '{name}' is not the member of an enum"):
        open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_fuzz(tmp_path: Path, seed: int) -> None:
    model = {name: tensor for name, tensor in whole_model(multi_query=True).items() if not name.startswith("layers.")}
    path = save(tmp_path, model, rng_state=[]) / "mp_rank_00/model_optim_rng.pt"
    good = path.read_bytes()
    tally = check_all(mutations(good, 150, random.Random(seed)), path, lambda _: open_checkpoint(tmp_path))
    print(f"seed {seed}: {tally}")
    assert tally.opened > 0
    assert len(tally.refusals) > 50
