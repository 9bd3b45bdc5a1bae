"""safetensors against files of the safetensors package, and against files that lie."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.unit.checkpoint.corrupt import HOSTILE_INTS, check_all, mutations
from writehead.checkpoint import open_checkpoint
from writehead.checkpoint.contract import DTYPES
from writehead.errors import CheckpointError


def example() -> dict[str, torch.Tensor]:
    """One tensor of every dtype that safetensors and torch share, a scalar and an empty one."""
    bits = torch.arange(24, dtype=torch.uint8).reshape(3, 8)
    tensors = {name: bits.view(dtype).clone() for name, dtype in DTYPES.items() if dtype != torch.bool}
    tensors |= {"BOOL": bits > 7, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}
    return tensors


def build(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file from its parts; `length` lies about the header's size."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(tmp_path: Path, data: bytes) -> str:
    """The message with which `data` is refused, without the directory."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    tensors = example()
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "gpt_bigcode"}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == path
        assert checkpoint.format == "safetensors"
        assert checkpoint.config == {"model_type": "gpt_bigcode"}
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, expected in tensors.items():
            checkpoint.prefetch(name)
            info, actual = checkpoint.tensors[name], checkpoint.read(name)
            assert (info.name, info.shape, info.num_bytes) == (name, tuple(expected.shape), expected.nbytes)
            assert DTYPES[info.dtype] == actual.dtype == expected.dtype
            assert actual.reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist()


def test_tensors_are_views_that_outlive_the_checkpoint_and_never_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"x": torch.arange(4.0)}, path)
    before = path.read_bytes()
    with open_checkpoint(path) as checkpoint:
        first, second = checkpoint.read("x"), checkpoint.read("x")
    assert first.data_ptr() == second.data_ptr()
    path.unlink()
    path.write_bytes(before)
    first += 1
    assert second.tolist() == [1, 2, 3, 4]
    assert path.read_bytes() == before


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    header = {"a": entry("U8", [1], [0, 1]), "b": entry("F32", [2], [1, 9])}
    path = tmp_path / "model.safetensors"
    path.write_bytes(build(header, b"\7" + torch.tensor([0.5, -2.0]).numpy().tobytes()))
    assert open_checkpoint(path).read("b").tolist() == [0.5, -2.0]


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: there is no tensor 'y' in this checkpoint"):
        open_checkpoint(tmp_path).read("y")


def test_a_truncated_file_says_where_and_what_to_do(tmp_path: Path) -> None:
    whole = build({"x": entry("F32", [100], [0, 400])}, bytes(400))
    assert refusal(tmp_path, whole[:-300]) == (
        f"model.safetensors: tensor 'x' ends at byte {len(whole)} but the file has {len(whole) - 300} bytes;"
        " the file is truncated, download it again"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes, too few"),
        (build(b"{}", length=2**63), "header of 9223372036854775808 bytes, more than 100000000"),
        (build(b"{}", length=3), "header of 3 bytes but the file has 10 bytes; the file is truncated"),
        (build(b"[]"), "does not start with '{'"),
        (build(b'{"x": 1'), "not valid JSON"),
        (build(b'{"\xff": 1}'), "not UTF-8 text (byte 2)"),
        (build(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
        (build(b'{"a": 1' + b"0" * 5000 + b"}"), "not valid JSON"),
        (build(b'{"x": {"dtype": "F32", "dtype": "F32"}}'), "the key 'dtype' appears twice"),
        (build(b'{"x": 1, "x": 1}'), "the key 'x' appears twice"),
        (build({"__metadata__": {"format": 1}}), "'__metadata__' must map names to strings"),
        (build({"x": {"dtype": "F32"}}), "expected dtype, shape and data_offsets"),
        (build({"x": entry("F4")}, bytes(8)), "has the dtype 'F4', expected one of F64, F32"),
        (build({"x": entry(["F32"])}, bytes(8)), "has the dtype ['F32']"),
        (build({"x": entry(shape=[-2])}, bytes(8)), "has the shape [-2], expected a list of non-negative integers"),
        (build({"x": entry(shape=[True, 2])}, bytes(8)), "has the shape [True, 2]"),
        (build({"x": entry(shape=[2.0])}, bytes(8)), "has the shape [2.0]"),
        (build({"x": entry(shape=2)}, bytes(8)), "has the shape 2"),
        (build({"x": entry(offsets=[0, 8, 8])}, bytes(8)), "expected two non-negative integers"),
        (build({"x": entry(offsets=[-8, 0])}, bytes(8)), "has the offsets [-8, 0]"),
        (build({"x": entry(offsets=[8, 0])}, bytes(8)), "needs 8 bytes but has the offsets [8, 0]"),
        (build({"x": entry(shape=[3])}, bytes(8)), "of shape [3] and dtype F32 needs 12 bytes"),
        (build({"x": entry(shape=[2**32, 2**32, 0], offsets=[0, 0])}), "has the impossible shape"),
        (build({"x": entry(shape=[2**62], offsets=[0, 2**64])}), "ends at byte 18446744073709551"),
        (build({"x": entry(shape=[0] * 65, offsets=[0, 0])}), "has 65 dimensions, more than 64"),
        (build({"x": entry(), "y": entry(offsets=[4, 12])}, bytes(12)), "overlaps the tensor before it"),
        (build({"x": entry(), "y": entry(offsets=[12, 20])}, bytes(20)), "leaves a hole before it"),
        (build({"x": entry()}, bytes(12)), "tensors end at byte"),
    ],
)
def test_lies_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in refusal(tmp_path, data)


def shards(directory: Path, weight_map: dict[str, Any]) -> None:
    """Two shards with x and y, and an index that says `weight_map`."""
    safetensors.torch.save_file({"x": torch.ones(2)}, directory / "model-00001-of-00002.safetensors")
    safetensors.torch.save_file({"y": torch.zeros(3)}, directory / "model-00002-of-00002.safetensors")
    index = json.dumps({"metadata": {"total_size": 20}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    shards(tmp_path, {"x": ONE, "y": TWO})
    checkpoint = open_checkpoint(tmp_path)
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {"x": (2,), "y": (3,)}
    assert checkpoint.read("y").tolist() == [0, 0, 0]


def test_a_tensor_that_only_the_index_has_is_none(tmp_path: Path) -> None:
    shards(tmp_path, {"x": ONE, "y": TWO, "lm_head.weight": TWO})
    assert open_checkpoint(tmp_path).tensors.keys() == {"x", "y"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": ONE, "y": "model-00003-of-00003.safetensors"}, "missing, download them again: model-00003-of-00003"),
        ({"x": "../" + ONE}, "expected a plain *.safetensors file name"),
        ({"x": "/etc/x.safetensors"}, "expected a plain *.safetensors file name"),
        ({"x": "..\\x.safetensors"}, "expected a plain *.safetensors file name"),
        ({"x": "\0.safetensors"}, "expected a plain *.safetensors file name"),
        ({"x": "pytorch_model.bin"}, "expected a plain *.safetensors file name"),
        ({"x": 1}, "expected a plain *.safetensors file name"),
        ({"x": ""}, "expected a plain *.safetensors file name"),
        ({}, "'weight_map' must be a non-empty object"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, {"x": ONE, "y": TWO})
    safetensors.torch.save_file({"x": torch.ones(2), "y": torch.zeros(3)}, tmp_path / TWO)
    with pytest.raises(CheckpointError, match="these tensors are also in another shard: x"):
        open_checkpoint(tmp_path)


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / ONE)
    with pytest.raises(CheckpointError, match=r"shards but not their index, download model.safetensors.index.json"):
        open_checkpoint(tmp_path)


def test_a_header_of_300_tensors_opens_in_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    names = [f"transformer.h.{i}.attn.c_attn.weight" for i in range(300)]
    safetensors.torch.save_file({name: torch.zeros(8, 8) for name in names}, path)
    times = []
    for _ in range(5):
        begin = time.process_time()
        open_checkpoint(path).close()
        times.append(time.process_time() - begin)
    assert min(times) < 0.02


def hostile_headers(rng: random.Random, count: int) -> Iterator[bytes]:
    """Valid JSON with wrong content: numbers, types, nesting and names put where others were."""
    values: list[Any] = [
        *HOSTILE_INTS,
        -1,
        1.5,
        None,
        True,
        "",
        "F32",
        [],
        [[]],
        [[[1]]],
        {},
        {"a": {}},
        "x" * 300,
        [2**63] * 3,
    ]
    for _ in range(count):
        names = ["a", "b", "c"]
        header: dict[str, Any] = {name: entry("F32", [2], [8 * i, 8 * i + 8]) for i, name in enumerate(names)}
        target = header[rng.choice(names)]
        key = rng.choice(list(target))
        if isinstance(target[key], list) and rng.random() < 0.7:
            target[key][rng.randrange(len(target[key]))] = rng.choice(values)
        else:
            target[key] = rng.choice(values)
        if rng.random() < 0.1:  # shape and offsets agree, the file does not
            header["c"] = entry("U8", [number := rng.choice(HOSTILE_INTS)], [16, 16 + number])
        if rng.random() < 0.1:
            header["__metadata__"] = rng.choice(values)
        yield build(header, bytes(24))


def test_fuzz(tmp_path: Path, seed: int) -> None:
    good = safetensors.torch.save(example(), metadata={"format": "pt"})
    path, rng = tmp_path / "model.safetensors", random.Random(seed)
    assert check_all([good], path, open_checkpoint).opened == 1
    raw = check_all(mutations(good, 1200, rng), path, open_checkpoint)
    structured = check_all(hostile_headers(rng, 800), path, open_checkpoint)
    print(f"seed {seed}: bytes {raw}; headers {structured}")
    assert raw.opened > 0  # damage in the data alone changes numbers, not the structure
    assert len(raw.refusals) > 800
    assert len(structured.refusals) > 600
    for reason in ("has the dtype", "has the shape", "has the offsets", "needs", "ends at byte", "impossible"):
        assert any(reason in message for message in structured.refusals), reason
