"""torch's files: what torch.save writes is read, anything that is more than weights is refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.corrupt import check_all, mutations
from writehead.checkpoint import open_checkpoint
from writehead.errors import CheckpointError


def example() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(6.0).reshape(2, 3),
        "half": torch.arange(4, dtype=torch.bfloat16),
        "turned": torch.arange(6).reshape(2, 3).t(),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
    }


def saved(content: object, **options: Any) -> bytes:
    buffer = BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def refusal(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_reads_what_torch_saves(tmp_path: Path, zipped: bool) -> None:
    content = OrderedDict(example(), weight=torch.nn.Parameter(torch.ones(2)))
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (tmp_path / "config.json").write_text('{"n_head": 4}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.format, checkpoint.config) == ("torch", {"n_head": 4})
        assert checkpoint.tensors.keys() == content.keys()
        assert [checkpoint.tensors[name].dtype for name in ("a", "half", "mask")] == ["F32", "BF16", "BOOL"]
        for name, expected in content.items():
            checkpoint.prefetch(name)
            actual = checkpoint.read(name)
            assert torch.equal(actual, expected)
            assert actual.is_contiguous()
            assert not actual.requires_grad
            assert checkpoint.tensors[name].num_bytes == expected.nbytes


def test_zip_files_are_mapped_not_read(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(1 << 20)}, path)
    tensor = open_checkpoint(path).read("w")
    assert str(path) in Path("/proc/self/maps").read_text("utf-8")
    tensor.zero_()
    assert open_checkpoint(path).read("w").sum() == 1 << 20


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "module"])
def test_a_state_dict_in_an_obvious_wrapper_is_unwrapped(tmp_path: Path, wrapper: str) -> None:
    torch.save({wrapper: {"w": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).read("w").tolist() == [1, 1]


def test_a_training_checkpoint_is_refused_by_its_keys(tmp_path: Path) -> None:
    message = refusal(tmp_path, saved({"model": {"w": torch.ones(2)}, "optimizer": {}, "step": 3}))
    assert message == (
        "these entries are not tensors: 'model', 'optimizer', 'step';"
        " expected a flat dict of named tensors, save the model's state_dict alone"
    )


def test_a_dict_that_holds_itself_is_refused(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["model"] = loop
    assert "these entries are not tensors: 'model'" in refusal(tmp_path, saved(loop))


class Exploit:
    """What a malicious pickle does: calls any function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("function", [os.mkdir, shutil.copy])
def test_code_in_a_pickle_is_named_and_not_run(tmp_path: Path, zipped: bool, function: Callable[..., Any]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.touch()
    exploit = Exploit(os.mkdir, str(target)) if function is os.mkdir else Exploit(shutil.copy, str(source), str(target))
    data = saved({"w": torch.ones(2), "x": exploit}, _use_new_zipfile_serialization=zipped)
    message = refusal(tmp_path, data)
    assert f"asks for the Python object '{'posix.mkdir' if function is os.mkdir else 'shutil.copy'}'" in message
    assert "never code from a pickle" in message
    assert "weights_only" not in message
    assert not target.exists()


def rezip(data: bytes, compression: int, extra: dict[str, bytes] | None = None) -> bytes:
    """The same zip members, stored or compressed, and more of them."""
    buffer = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as source, zipfile.ZipFile(buffer, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        for name, content in (extra or {}).items():
            target.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty; download it again"),
        (b"not a pickle at all", "is not a file of weights that torch can load"),
        (b"PK\3\4 not a zip", "is not a file of weights that torch can load"),
        (saved([torch.ones(1)]), "holds a list, expected a dict of named tensors"),
        (saved({1: torch.ones(1)}), "holds a dict, expected a dict of named tensors"),
        (saved({"w": torch.ones(2).to_sparse()}), "is not a plain dense tensor"),
        (saved({"w": torch.empty(2, device="meta")}), "is not a plain dense tensor"),
        (saved({"w": torch.ones(1).expand(10**12)}), "has only 4 bytes of data; the file is damaged"),
        (rezip(saved(example()), zipfile.ZIP_DEFLATED), "is a compressed zip file"),
        (rezip(saved(example()), zipfile.ZIP_STORED, {"archive/constants.pkl": b""}), "is a TorchScript program"),
        (saved(example())[:-200], "is not a file of weights that torch can load"),
    ],
    ids=str,
)
def test_what_is_not_a_state_dict_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in refusal(tmp_path, data)


ONE, TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def shards(directory: Path, weight_map: dict[str, str]) -> None:
    torch.save({"x": torch.ones(2)}, directory / ONE)
    torch.save({"y": torch.zeros(3)}, directory / TWO)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    shards(tmp_path, {"x": ONE, "y": TWO})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path
    assert checkpoint.read("x").tolist() == [1, 1]
    assert checkpoint.read("y").tolist() == [0, 0, 0]


def test_a_wrong_index_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, {"x": ONE, "y": "../" + TWO})
    with pytest.raises(CheckpointError, match=r"expected a plain \*.bin file name"):
        open_checkpoint(tmp_path)
    shards(tmp_path, {"x": ONE, "y": TWO})
    torch.save({"x": torch.ones(1), "y": torch.ones(1)}, tmp_path / TWO)
    with pytest.raises(CheckpointError, match="also in another shard: x"):
        open_checkpoint(tmp_path)
    (tmp_path / TWO).unlink()
    with pytest.raises(CheckpointError, match=f"missing, download them again: {TWO}"):
        open_checkpoint(tmp_path)


def hostile_pickles(good: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """A valid zip around a damaged pickle, so that the damage reaches the unpickler."""
    with zipfile.ZipFile(BytesIO(good)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    for damaged in mutations(members[name], count, rng):
        buffer = BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, damaged if member == name else content)
        yield buffer.getvalue()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_fuzz(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "model.bin", random.Random(seed)
    good = saved(example())
    old = saved(example(), _use_new_zipfile_serialization=False)
    assert check_all([good, old], path, open_checkpoint).opened == 2
    tallies = [
        check_all(mutations(good, 200, rng), path, open_checkpoint),
        check_all(hostile_pickles(good, rng, 300), path, open_checkpoint),
        check_all(mutations(old, 300, rng), path, open_checkpoint),
    ]
    print(f"seed {seed}: zip {tallies[0]}; pickle {tallies[1]}; legacy {tallies[2]}")
    assert all(tally.opened > 0 and len(tally.refusals) > 100 for tally in tallies)


def test_a_file_of_the_plain_pickle_module_is_refused_without_torchs_warning(tmp_path: Path) -> None:
    """torch warns of the newer protocol; the suite makes a warning an error, which would be the message."""
    message = refusal(tmp_path, pickle.dumps({"a": os.system}, protocol=4))
    assert message.startswith("is not a file of weights that torch can load (UnpicklingError: ")
