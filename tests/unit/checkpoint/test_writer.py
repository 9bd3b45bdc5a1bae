"""The writer: what it writes, the safetensors package, transformers and our own reader read back bit by bit."""

from __future__ import annotations

import json
import os
import resource
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from writehead.checkpoint import open_checkpoint, write_safetensors
from writehead.checkpoint.contract import DTYPES
from writehead.errors import CheckpointError


def example() -> dict[str, torch.Tensor]:
    """All dtypes, an odd number of bytes before wider types, a transposed view, a scalar and an empty tensor."""
    bits = torch.arange(24, dtype=torch.uint8).reshape(3, 8)
    tensors = {f"t.{name}": bits.view(dtype).clone() for name, dtype in DTYPES.items() if dtype != torch.bool}
    return {
        "odd": torch.ones(3, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        **tensors,
    }


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, two)]
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(*raw)


def test_one_file_is_read_by_the_package_and_by_us(tmp_path: Path) -> None:
    tensors, target = example(), tmp_path / "new" / "model"
    paths = write_safetensors(target, tensors, config={"model_type": "gpt_bigcode", "n_head": 4})
    assert paths == [target / "model.safetensors"]
    assert sorted(item.name for item in target.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((target / "config.json").read_text()) == {"model_type": "gpt_bigcode", "n_head": 4}
    theirs = safetensors.torch.load_file(paths[0])
    with open_checkpoint(target) as ours:
        assert theirs.keys() == tensors.keys() == ours.tensors.keys()
        assert ours.metadata == {"format": "pt"}
        for name, expected in tensors.items():
            assert same_bits(theirs[name], expected)
            assert same_bits(ours.read(name), expected)
            if expected.numel():  # aligned, so mapped and not copied
                assert ours.read(name).data_ptr() == ours.read(name).data_ptr()


def test_shards_are_filled_in_order_and_indexed(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((4,), float(i)) for i in range(5)} | {"big": torch.arange(100.0)}
    paths = write_safetensors(tmp_path / "m", tensors, config={}, max_shard_bytes=40)
    assert [path.name for path in paths] == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert [sorted(safetensors.torch.load_file(path)) for path in paths] == [
        ["w0", "w1"],
        ["w2", "w3"],
        ["w4"],
        ["big"],
    ]
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 480}
    assert index["weight_map"]["big"] == "model-00004-of-00004.safetensors"
    checkpoint = open_checkpoint(tmp_path / "m")
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())


def test_tensors_may_come_in_any_order_and_only_one_is_held(tmp_path: Path) -> None:
    specs = {f"w{i}": torch.empty(100, device="meta") for i in range(9)}
    given: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i in reversed(range(9)):
            assert [ref() for ref in given] == [None] * len(given)
            tensor = torch.full((100,), float(i))
            given.append(weakref.ref(tensor))
            yield f"w{i}", tensor
            del tensor

    write_safetensors(tmp_path / "m", specs, stream(), config={}, max_shard_bytes=1000)
    assert len(given) == 9
    checkpoint = open_checkpoint(tmp_path / "m")
    assert [checkpoint.read(f"w{i}").unique().tolist() for i in range(9)] == [[i] for i in range(9)]


def test_transformers_loads_it(tmp_path: Path) -> None:
    config = transformers.GPTBigCodeConfig(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPTBigCodeForCausalLM(config).eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    write_safetensors(tmp_path / "m", state, config=config.to_dict(), max_shard_bytes=6000)
    assert (tmp_path / "m/model.safetensors.index.json").is_file()
    loaded, report = transformers.GPTBigCodeForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "merges.txt", "secret.txt", "model.safetensors"):
        (source / name).write_text(name)
    (source / "tokenizer_config.json").symlink_to(source / "tokenizer.json")  # as in the Hub's cache
    write_safetensors(tmp_path / "m", {"w": torch.ones(1)}, config={}, tokenizer_from=source)
    names = ["config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(item.name for item in (tmp_path / "m").iterdir()) == names
    assert not (tmp_path / "m/tokenizer_config.json").is_symlink()


def test_a_directory_with_files_in_it_is_kept_unless_told(tmp_path: Path) -> None:
    old = {"w": torch.zeros(64)}
    write_safetensors(tmp_path, old, config={"n": 1}, max_shard_bytes=1)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not empty \(config.json, model.safetensors, notes.txt\)"):
        write_safetensors(tmp_path, {"w": torch.ones(1)}, config={"n": 2})
    assert open_checkpoint(tmp_path).config == {"n": 1}
    many = {"v": torch.ones(8), "w": torch.ones(8)}
    write_safetensors(tmp_path, many, config={"n": 2}, max_shard_bytes=32, overwrite=True)
    assert open_checkpoint(tmp_path).tensors.keys() == {"v", "w"}
    source = open_checkpoint(tmp_path)  # rewriting a checkpoint from itself: its old files are replaced at the end
    write_safetensors(tmp_path, {"w": source.read("w")}, config={"n": 3}, overwrite=True)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert (open_checkpoint(tmp_path).config, open_checkpoint(tmp_path).read("w").tolist()) == ({"n": 3}, [1] * 8)
    with pytest.raises(CheckpointError, match="is a file, expected a directory"):
        write_safetensors(tmp_path / "notes.txt", many, config={})


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("a", torch.zeros(2))], "these tensors never came: b"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "tensor 'a' came twice or was not announced"),
        ([("c", torch.zeros(2))], "tensor 'c' came twice or was not announced"),
        ([("a", torch.zeros(3))], "tensor 'a' is torch.float32 [3], expected torch.float32 [2]"),
        ([("a", torch.zeros(2, dtype=torch.int32))], "tensor 'a' is torch.int32 [2], expected torch.float32 [2]"),
    ],
)
def test_tensors_that_do_not_fit_leave_nothing_behind(
    tmp_path: Path, stream: list[tuple[str, torch.Tensor]], message: str
) -> None:
    specs = {"a": torch.empty(2, device="meta"), "b": torch.empty(2, device="meta")}
    with pytest.raises(CheckpointError) as caught:
        write_safetensors(tmp_path / "m", specs, stream, config={})
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_stream_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": torch.ones(2)}, config={"n": 1})

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise KeyboardInterrupt
        yield "a", torch.ones(2)

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path, {"a": torch.ones(2)}, broken(), config={"n": 2}, overwrite=True)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert open_checkpoint(tmp_path).config == {"n": 1}


def test_a_write_that_the_system_stops_is_one_sentence(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the same call fails in the same place."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written \(File too large\)"):
            write_safetensors(tmp_path / "m", {"w": torch.ones(100_000)}, config={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_noticed_before_writing(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    huge = torch.empty(free.f_bavail * free.f_frsize + (1 << 40), dtype=torch.uint8, device="meta")
    with pytest.raises(CheckpointError, match=r"needs [\d.,]+ MB but the disk has [\d.,]+ MB free; make room"):
        write_safetensors(tmp_path / "m", {"w": huge}, [], config={})
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_the_format_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"tensor 'w' has the dtype torch.complex128, which safetensors cannot hold"
    ):
        write_safetensors(tmp_path / "m", {"w": torch.zeros(1, dtype=torch.complex128)}, config={})


def test_what_blocks_the_way_is_found_before_anything_is_replaced(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": torch.ones(2)}, config={"n": 1})
    (tmp_path / "source").mkdir()
    (tmp_path / "source/tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"holds directories where files belong: tokenizer.json"):
        write_safetensors(
            tmp_path, {"a": torch.zeros(2)}, config={"n": 2}, overwrite=True, tokenizer_from=tmp_path / "source"
        )
    old = open_checkpoint(tmp_path)
    assert (old.config, old.read("a").tolist()) == ({"n": 1}, [1, 1])


def test_a_new_tokenizer_leaves_no_file_of_the_old_one(tmp_path: Path) -> None:
    out, source = tmp_path / "out", tmp_path / "source"
    for folder, names in ((out, ("vocab.json", "merges.txt", "chat_template.jinja")), (source, ("tokenizer.json",))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("{}")
    write_safetensors(out, {"a": torch.ones(2)}, config={}, overwrite=True)
    assert (out / "vocab.json").exists()  # nothing takes its place
    write_safetensors(out, {"a": torch.ones(2)}, config={}, overwrite=True, tokenizer_from=source)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_name_that_no_system_takes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the checkpoint could not be written \(File name too long\)"):
        write_safetensors(tmp_path / ("x" * 300), {"a": torch.ones(2)}, config={})


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/tokenizer.json").write_text("{}")
    real = Path.open

    def forbidden(path: Path, *arguments: Any, **options: Any) -> Any:  # root may read everything
        if path.parent.name == "source":
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(CheckpointError, match=r"source/tokenizer.json: cannot be read \(Permission denied\)"):
        write_safetensors(tmp_path / "m", {"a": torch.ones(2)}, config={}, tokenizer_from=tmp_path / "source")
    assert not (tmp_path / "m").exists()
