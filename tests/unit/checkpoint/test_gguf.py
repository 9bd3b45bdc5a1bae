"""GGUF against files of the gguf package, and against files that lie."""

from __future__ import annotations

import random
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.unit.checkpoint.corrupt import HOSTILE_INTS, check_all, mutations
from writehead.checkpoint import open_checkpoint
from writehead.checkpoint.gguf import open_gguf
from writehead.errors import CheckpointError

Type = gguf.GGMLQuantizationType
QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "BF16")
BLOCKS = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
    *(name for name in ("NVFP4",) if name in Type.__members__),  # newer than the oldest gguf that we support,
)
PLAIN = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}


def write(path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], str | None]], **options: Any) -> None:
    """A GGUF file by the gguf package: all value types, and `tensors` (array, type of raw blocks or None)."""
    writer = gguf.GGUFWriter(path, "starcoder", **options)
    for kind, value in (("uint8", 255), ("int8", -1), ("uint16", 65535), ("int16", -2), ("uint32", 7), ("int32", -3)):
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
    writer.add_uint64("k.uint64", 2**64 - 1)
    writer.add_int64("k.int64", -(2**63))
    writer.add_float32("k.float32", 0.5)
    writer.add_float64("k.float64", 1e300)
    writer.add_bool("k.bool", True)
    writer.add_string("k.string", "größe\n")
    writer.add_array("k.strings", ["a", "Ġthe", ""])
    writer.add_array("k.ints", [1, -2, 3])
    writer.add_array("k.floats", [0.25, -1.0])
    writer.add_array("k.bools", [True, False])
    writer.add_array("k.nested", [[1, 2], [3]])
    for name, (array, blocks) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=None if blocks is None else Type[blocks])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes as blocks: every bit pattern is a value in these formats."""
    return np.random.randint(0, 256, (rows, blocks * gguf.GGML_QUANT_SIZES[Type[kind]][1]), dtype=np.uint8)


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    plain = {name: np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in PLAIN.items()}
    write(path, {name: (array, None) for name, array in plain.items()})
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.path, checkpoint.format, checkpoint.config) == (path, "gguf", {})
        assert {key: value for key, value in checkpoint.metadata.items() if key.startswith("k.")} == {
            "k.uint8": 255,
            "k.int8": -1,
            "k.uint16": 65535,
            "k.int16": -2,
            "k.uint32": 7,
            "k.int32": -3,
            "k.uint64": 2**64 - 1,
            "k.int64": -(2**63),
            "k.float32": 0.5,
            "k.float64": 1e300,
            "k.bool": True,
            "k.string": "größe\n",
            "k.strings": ["a", "Ġthe", ""],
            "k.ints": [1, -2, 3],
            "k.floats": [0.25, -1.0],
            "k.bools": [True, False],
            "k.nested": [[1, 2], [3]],
        }
        assert checkpoint.metadata["general.architecture"] == "starcoder"
        for name, array in plain.items():
            checkpoint.prefetch(name)
            info, tensor = checkpoint.tensors[name], checkpoint.read(name)
            assert (info.shape, info.dtype, info.num_bytes) == ((2, 3), name, array.nbytes)
            assert tensor.dtype == getattr(torch, PLAIN[name])
            assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_quantized_tensors_come_back_within_their_precision(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    values = np.random.standard_normal((6, 512)).astype(np.float32)
    blocks = gguf.quants.quantize(values, Type[kind])
    write(path, {"w": (blocks, kind)})
    checkpoint = open_gguf(path)
    assert checkpoint.tensors["w"].shape == (6, 512)
    assert checkpoint.tensors["w"].dtype == kind
    assert np.array_equal(checkpoint.raw("w"), blocks.view(np.uint8).reshape(6, -1))
    actual = checkpoint.read("w").float().numpy()
    assert np.array_equal(actual, gguf.quants.dequantize(blocks, Type[kind]))
    error = float(np.abs(actual - values).mean())
    limit = {"Q4_0": 0.12, "Q4_1": 0.1, "Q5_0": 0.06, "Q5_1": 0.05, "Q8_0": 0.01, "BF16": 0.01}.get(kind, 0.9)
    assert 0 < error < limit


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_block_format_reads_as_the_package_dequantizes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    blocks = random_blocks(kind, 4, 2)
    write(path, {"w": (blocks, kind), "bias": (np.arange(3, dtype=np.float32), None)})
    checkpoint = open_gguf(path)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, Type[kind])
    assert checkpoint.tensors["w"].shape == expected.shape
    assert checkpoint.read("w").dtype == torch.float32
    assert np.array_equal(checkpoint.read("w").numpy(), expected, equal_nan=True)
    assert np.array_equal(checkpoint.raw("w"), blocks)
    assert checkpoint.read("bias").tolist() == [0, 1, 2]


def test_every_type_that_the_package_dequantizes_is_covered() -> None:
    known = set()
    for kind in Type:
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        known.add(kind.name)
    assert known <= {*QUANTIZABLE, *BLOCKS, *PLAIN}


def test_dimensions_are_reversed_and_plain_tensors_are_views(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    write(path, {"w": (array, None)})
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["w"].shape == (2, 3, 4)
    assert torch.equal(checkpoint.read("w"), torch.from_numpy(array))
    assert checkpoint.read("w").data_ptr() == checkpoint.read("w").data_ptr()


def test_parts_of_a_split_model_are_one_checkpoint(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {f"w{i}": (np.full((2, 2), i, dtype=np.float32), None) for i in range(5)}
    write(tmp_path / "m.gguf", tensors, split_max_tensors=2)
    names = [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert sorted(item.name for item in tmp_path.iterdir()) == names
    for path in (tmp_path, *(tmp_path / name for name in names)):
        checkpoint = open_checkpoint(path)
        assert {name: checkpoint.read(name)[0, 0].item() for name in tensors} == {f"w{i}": i for i in range(5)}
        assert checkpoint.metadata["k.uint32"] == 7
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / names[0], tmp_path / "alone" / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m.gguf: is one of 3 parts; name the parts"):
        open_checkpoint(tmp_path / "alone")
    shutil.copy(tmp_path / names[0], tmp_path / names[1])
    with pytest.raises(CheckpointError, match=r"says it is part 0 of 3 \(counted from 0\), expected 1 of 3"):
        open_checkpoint(tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"parts of the model are missing, download them: {names[1]}"):
        open_checkpoint(tmp_path)


def test_several_models_in_one_folder_are_not_guessed_at(tmp_path: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        write(tmp_path / name, {"w": (np.zeros((2, 2), dtype=np.float32), None)})
    with pytest.raises(CheckpointError, match=r"several checkpoints, name one of them: q4.gguf, q8.gguf"):
        open_checkpoint(tmp_path)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(
    name: str = "w", dims: tuple[int, ...] = (2,), kind: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    head = struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return string(name) + head + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, offset)


def build(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A GGUF file from its parts; `counts` (tensors, keys) lies about how many there are."""
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 if tensors else 0) + data


def nested(depth: int) -> bytes:
    """An array of one array of one array, and so on, around one byte."""
    return struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQ", 0, 1) + b"\7"


@pytest.mark.parametrize("version", [2, 3])
def test_hand_made_files_open(tmp_path: Path, version: int) -> None:
    keys = [key("general.alignment", 4, struct.pack("<I", 64)), key("deep", 9, nested(4))]
    (tmp_path / "m.gguf").write_bytes(build(keys, [tensor()], bytes(64) + struct.pack("<ff", 1, 2), version=version))
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.metadata == {"general.alignment": 64, "deep": [[[[7]]]]}
    assert checkpoint.tensors["w"].num_bytes == 8
    assert checkpoint.read("w").shape == (2,)


HUGE = struct.pack("<Q", 2**64 - 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not start with 'GGUF'"),
        (b"GGUF\3\0\0\0", "ends at byte 16 but the file has 8 bytes; the file is truncated"),
        (build([], [], version=1), "is GGUF version 1"),
        (build([], [], version=4), "is GGUF version 4, expected 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF"),
        (build([], [], counts=(2**64 - 1, 0)), "announces 18446744073709551615 tensors but the file has 0 bytes left"),
        (build([], [], counts=(0, 2**63)), "announces 9223372036854775808 keys"),
        (build([HUGE], [], counts=(0, 1)), "truncated"),
        (build([HUGE + bytes(8)], []), "holds a string of 18446744073709551615 bytes, but 8 are left"),
        (build([key("a", 13, bytes(8))], []), "the key 'a' has a value of type 13, expected 0 to 12"),
        (build([key("a", 7, b"\2")], []), "neither 0 nor 1"),
        (build([key("a", 8, string(b"\xff"))], []), "the key 'a' holds a string that is not UTF-8 text"),
        (build([key("a", 0, b"\1")] * 2, []), "the key 'a' appears twice"),
        (build([key("a", 9, struct.pack("<I", 6) + HUGE)], []), "announces 18446744073709551615 array elements"),
        (build([key("a", 9, struct.pack("<IQ", 8, 3) + bytes(24)[:20])], []), "announces 3 array elements"),
        (build([key("a", 9, struct.pack("<IQ", 99, 1) + bytes(8))], []), "is an array of type 99"),
        (build([key("a", 9, nested(5))], []), "nested more than 4 deep"),
        (build([key("general.alignment", 4, struct.pack("<I", 24))], []), "is 24, expected a power of two"),
        (build([key("general.alignment", 4, struct.pack("<I", 0))], []), "is 0, expected a power of two"),
        (build([key("general.alignment", 8, string("32"))], []), "is '32', expected a power of two"),
        (build([], [tensor()] * 2, bytes(64)), "tensor 'w' appears twice"),
        (build([], [tensor(num_dims=5, dims=(1,) * 5)], bytes(32)), "has 5 dimensions, more than 4"),
        (build([], [tensor(num_dims=2**32 - 1)], bytes(32)), "has 4294967295 dimensions"),
        (build([], [tensor(dims=(2**63, 2))], bytes(32)), "has the impossible shape"),
        (build([], [tensor(dims=(2**32, 2**32, 0))], bytes(32)), "has the impossible shape"),
        (build([], [tensor(dims=(2**62,))], bytes(32)), "ends at byte 18446744073709551"),
        (build([], [tensor(kind=9, dims=(32,))], bytes(64)), "has the type Q8_1, which cannot be read"),
        (build([], [tensor(kind=4)], bytes(64)), "has the type 4 (unknown)"),
        (
            build([], [tensor(kind=2, dims=(33,))], bytes(64)),
            "rows of 33 numbers, expected a multiple of Q4_0's block of 32",
        ),
        (build([], [tensor(offset=4)], bytes(64)), "starts at offset 4, expected a multiple of 32"),
        (build([], [tensor(offset=2**64 - 32)], bytes(64)), "but the file has"),
        (build([], [tensor(), tensor("v")], bytes(64)), "inside the tensor before it"),
        (build([], [tensor()], bytes(7)), "the file is truncated, download it again"),
    ],
)
def test_lies_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_vocabulary_of_150_000_opens_fast(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens = b"".join(string(f"Ġtoken{i}") for i in range(150_000))
    scores = np.arange(150_000, dtype="<f4").tobytes()
    keys = [
        key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 150_000) + tokens),
        key("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 150_000) + scores),
    ]
    path.write_bytes(build(keys, [tensor(f"blk.{i}", offset=32 * i) for i in range(300)], bytes(32 * 300)))
    times = []
    for _ in range(3):
        begin = time.process_time()
        checkpoint = open_checkpoint(path)
        times.append(time.process_time() - begin)
    assert checkpoint.metadata["tokenizer.ggml.tokens"][149_999] == "Ġtoken149999"
    assert checkpoint.metadata["tokenizer.ggml.scores"][149_999] == 149_999
    assert min(times) < 0.5


def hostile_headers(rng: random.Random, count: int) -> Iterator[bytes]:
    """Well-formed parts with hostile numbers, counts, types and nesting in them."""
    kinds = [*range(14), 2**32 - 1]
    for _ in range(count):
        number = rng.choice(HOSTILE_INTS) & (2**64 - 1)
        keys = [
            key("general.alignment", 4, struct.pack("<I", rng.choice((32, 32, 32, 1, 16, 48, number & 0xFFFFFFFF)))),
            key("a", rng.choice(kinds), struct.pack("<Q", number)),
            key("b", 9, struct.pack("<IQ", rng.choice(kinds), rng.choice((0, 1, 3, number))) + rng.randbytes(24)),
            key("c", 9, nested(rng.randrange(1, 8))),
        ]
        tensors = [
            tensor(
                rng.choice("vwx"),
                tuple(rng.choice((1, 2, 32, 256, number)) for _ in range(rng.randrange(6))),
                rng.choice([*range(42), number & 0xFFFFFFFF]),
                rng.choice((0, 32, 64, number)),
            )
            for _ in range(rng.randrange(3))
        ]
        keys = rng.sample(keys, rng.randrange(len(keys)))
        counts = rng.choice((None, None, None, (number, 1), (1, number)))
        yield build(keys, tensors, bytes(256), counts=counts)


def test_fuzz(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "m.gguf", random.Random(seed)
    write(
        path,
        {
            "q8": (gguf.quants.quantize(np.ones((2, 64), dtype=np.float32), Type.Q8_0), "Q8_0"),
            "iq": (random_blocks("IQ2_XS", 2, 1), "IQ2_XS"),
            "f": (np.ones((3, 5), dtype=np.float32), None),
        },
    )
    good = path.read_bytes()
    assert check_all([good], path, open_checkpoint).opened == 1
    raw = check_all(mutations(good, 1200, rng), path, open_checkpoint)
    structured = check_all(hostile_headers(rng, 800), path, open_checkpoint)
    print(f"seed {seed}: bytes {raw}; headers {structured}")
    assert raw.opened > 50  # damage in values and padding changes numbers, not the structure
    assert len(raw.refusals) > 600
    assert structured.opened > 10
    assert len(structured.refusals) > 500
    for reason in ("power of two", "value of type", "array elements", "nested", "dimensions", "truncated", "twice"):
        assert any(reason in message for message in structured.refusals), reason
