"""What this machine can do at best: bytes read from memory in a second, and operations computed.

Both are measured with the fastest reader and the fastest product that torch offers here, on all of its threads. They
are floors of the truth: an operation that beats them says so by a share above one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from writehead.bench import machine
from writehead.bench.cost import Cost
from writehead.bench.timing import at_least, median
from writehead.build import free_memory

SIDE = 2048
"""Of the square matrices that are multiplied: long enough that starting the product costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Measured limits of the machine."""

    buffer_bytes: int
    """Size of what was read: larger than every cache."""
    read_gb_s: float
    fp32_gop_s: float
    bf16_gop_s: float | None
    int8_gop_s: float | None
    """None: there is no such product here."""

    def seconds(self, cost: Cost) -> tuple[float, str]:
        """The least time that a cost takes, and which limit makes it so: bandwidth or arithmetic."""
        moving = cost.bytes / self.read_gb_s / 1e9
        computing = cost.ops / self.gop_s(cost.dtype) / 1e9
        return max(moving, computing), "bandwidth" if moving >= computing else "arithmetic"

    def describe(self) -> str:
        """One line for people."""
        products = {"bf16": self.bf16_gop_s, "int8": self.int8_gop_s}
        more = "".join(f", {name} {value:.0f}" if value else f", no {name} product" for name, value in products.items())
        return (
            f"measured limits: {self.read_gb_s:.1f} GB/s read from {self.buffer_bytes / 1e6:.0f} MB; GOP/s: "
            f"fp32 {self.fp32_gop_s:.0f}{more}"
        )

    def gop_s(self, dtype: str) -> float:
        """The arithmetic limit of a type; that of fp32 where the type has no product of its own, or a slower one."""
        own = {"bf16": self.bf16_gop_s, "int8": self.int8_gop_s}.get(dtype)
        return max(own or 0.0, self.fp32_gop_s)


@torch.inference_mode()
def measure(*, seconds: float = 0.5, buffer_bytes: int | None = None, side: int = SIDE) -> Limits:
    """Measure for at least `seconds` each. The default buffer is four times the last cache, within a quarter of what
    is free."""
    size = buffer_bytes or min(4 * machine.last_cache(), free_memory() // 4)
    size = max(1, size >> 14) << 14  # whole rows of 4096 values of 4 bytes
    return Limits(
        buffer_bytes=size,
        read_gb_s=_bandwidth(size, seconds),
        fp32_gop_s=_product(torch.float32, seconds, side) or 0.0,
        bf16_gop_s=_product(torch.bfloat16, seconds, side),
        int8_gop_s=_product(torch.int8, seconds, side),
    )


def _bandwidth(size: int, seconds: float) -> float:
    """GB/s: the best of several ways to read, each by its median."""
    floats = torch.ones(size // 4)
    matrix, vector, whole = floats.view(-1, 4096), torch.ones(4096), floats.view(torch.int64)
    readers: list[Callable[[], object]] = [floats.sum, whole.sum, lambda: matrix @ vector]
    return max(size / median(at_least(read, seconds=seconds / len(readers))) / 1e9 for read in readers)


def _product(dtype: torch.dtype, seconds: float, side: int) -> float | None:
    """GOP/s of a square product; None where torch has none for the type."""
    a, b = (torch.ones(side, side).to(dtype) for _ in range(2))
    multiply: Callable[..., object] = torch._int_mm if dtype is torch.int8 else torch.mm
    try:
        multiply(a, b)
    except (RuntimeError, NotImplementedError):
        return None
    return 2 * side**3 / median(at_least(lambda: multiply(a, b), seconds=seconds)) / 1e9
