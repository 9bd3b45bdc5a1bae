"""Damaged and hostile files: seeded mutations of a good one, and the promise that every reader keeps about them."""

from __future__ import annotations

import contextlib
import random
import resource
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from writehead.checkpoint import Checkpoint
from writehead.errors import CheckpointError

HOSTILE_INTS: tuple[int, ...] = (
    0,
    1,
    2,
    3,
    7,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_ADDRESS_SPACE = 1 << 30  # beyond what the process has: one honest read of a hostile size would exceed it
_MEMORY_FACTOR = 40  # fp32 out of 1.5-bit blocks is 21 times the file, a list of short strings 10 times
_MEMORY_FLOOR = 1 << 20


def mutations(data: bytes, count: int, rng: random.Random) -> Iterator[bytes]:
    """`count` versions of `data`, each with one to three injuries; three of four lie in the first 4 KiB."""
    injuries = (_truncate, _flip, _splice_int, _delete, _repeat, _append)
    for _ in range(count):
        changed = data
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            reach = len(changed) if rng.random() < 0.25 else min(len(changed), 4096)
            changed = rng.choice(injuries)(changed, rng.randrange(reach or 1), rng)
        yield changed


def _truncate(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] if rng.random() < 0.5 else data[: len(data) - at % 64]


def _flip(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _splice_int(data: bytes, at: int, rng: random.Random) -> bytes:
    width = rng.choice((4, 8))
    value = rng.choice(HOSTILE_INTS) & (256**width - 1)
    return data[:at] + int(value).to_bytes(width, "little") + data[at + width :]


def _delete(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] + data[at + rng.randrange(1, 33) :]


def _repeat(data: bytes, at: int, rng: random.Random) -> bytes:
    end = at + rng.randrange(1, 129)
    return data[:end] + data[at:end] + data[end:]


def _append(data: bytes, at: int, rng: random.Random) -> bytes:
    return data + rng.randbytes(1 + at % 64)


@dataclass
class Tally:
    """What became of the files: how many opened, and the message of every refusal."""

    opened: int = 0
    refusals: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.opened} opened, {len(self.refusals)} refused"


def check_all(files: Iterable[bytes], path: Path, opener: Callable[[Path], Checkpoint]) -> Tally:
    """Opens and reads every file: each is a whole checkpoint or one CheckpointError, at a bounded cost in memory."""
    tally = Tally()
    with _bounded_memory(), path.open("wb", buffering=0) as file:
        for data in files:
            file.seek(0)
            file.truncate(0)
            file.write(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                _read_all(path, opener)
                tally.opened += 1
            except CheckpointError as error:
                tally.refusals.append(str(error))
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= _MEMORY_FLOOR + _MEMORY_FACTOR * len(data), f"{peak} bytes for a file of {len(data)}"
    for message in tally.refusals:
        assert "\n" not in message
        assert len(message) < 1000
    return tally


def _read_all(path: Path, opener: Callable[[Path], Checkpoint]) -> None:
    with opener(path) as checkpoint:
        assert sum(info.num_bytes for info in checkpoint.tensors.values()) <= path.stat().st_size
        for name, info in checkpoint.tensors.items():
            assert tuple(checkpoint.read(name).shape) == info.shape


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """tracemalloc sees Python's and numpy's memory; the limit on the address space also stops torch's."""
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    tracemalloc.start()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        tracemalloc.stop()
