"""The native library: where it is, what it offers on this machine, and its C ABI (native/ops.h) as ctypes."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE_NAME = "libwritehead_cpu.so"
ABI = 3


class Weight(Structure):
    """`struct Weight`."""

    _fields_ = (
        ("data", c_void_p), ("rows", c_int64), ("columns", c_int64), ("kind", c_int32), ("group", c_int32),
    )  # fmt: skip


class Attention(Structure):
    """`struct Attention`."""

    _fields_ = (
        ("q", c_void_p), ("out", c_void_p), ("keys", c_void_p), ("values", c_void_p),
        ("first_token", c_void_p), ("num_new", c_void_p), ("row", c_void_p), ("length", c_void_p), ("bias", c_void_p),
        ("sequences", c_int64), ("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64), ("q_stride", c_int64),
        ("capacity", c_int64), ("window", c_int64), ("bias_stride", c_int64), ("scale", c_float), ("kind", c_int32),
    )  # fmt: skip


_W, _P, _I, _L, _F = POINTER(Weight), c_void_p, c_int32, c_int64, c_float


class Ops(Structure):
    """`struct Ops`: the functions of one instruction set."""

    _fields_ = (
        ("packed_bytes", CFUNCTYPE(_L, _W)),
        ("pack", CFUNCTYPE(None, _W, _P, _I, _L)),
        ("linear", CFUNCTYPE(None, _W, _L, _P, _P, _I, _P, _P)),
        ("embed", CFUNCTYPE(None, _W, _L, _P, _P)),
        ("norm", CFUNCTYPE(None, _I, _L, _L, _P, _P, _P, _F, _F, _P)),
        ("activate", CFUNCTYPE(None, _I, _I, _L, _L, _P, _P)),
        ("rotate", CFUNCTYPE(None, _L, _L, _L, _L, _L, _P, _P, _P, _P)),
        ("store", CFUNCTYPE(None, _L, _L, _L, _L, _P, _P, _P, _P, _L, _I, _P, _P)),
        ("attention", CFUNCTYPE(None, POINTER(Attention))),
    )


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One set that the library was compiled for."""

    name: str
    index: int
    missing: str | None
    """Why it does not run here; None if it does."""


@dataclass(frozen=True, slots=True)
class Library:
    """The opened library."""

    path: Path
    handle: ctypes.CDLL
    sets: tuple[InstructionSet, ...]
    """Fastest first."""

    def ops(self, name: str) -> Ops:
        """The functions of the set `name`, which must run here."""
        index = next(s.index for s in self.sets if s.name == name and s.missing is None)
        ops: Ops = self.handle.writehead_ops(index).contents
        return ops


def candidates() -> tuple[Path, ...]:
    """Where an install puts the library: beside this file, or, for an editable one, in the environment."""
    folder = Path(__file__).parent
    inside = Path("writehead", "kernels", "cpu")
    return folder / FILE_NAME, *(Path(sysconfig.get_path(key)) / inside / FILE_NAME for key in ("platlib", "purelib"))


@cache
def open_library() -> Library | str:
    """The library, or one sentence why there is none."""
    path = next((p for p in candidates() if p.is_file()), None)
    if path is None:
        return "the native library was not built: install a C++20 compiler (g++ 11 or clang 14), then writehead again"
    try:
        handle = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        return f"the native library {path} cannot be opened: {error}"
    if handle.writehead_abi() != ABI:
        return f"the native library {path} is of another version of writehead: install writehead again"
    handle.writehead_set.restype = handle.writehead_missing.restype = c_char_p
    handle.writehead_ops.restype = POINTER(Ops)
    sets: list[InstructionSet] = []
    while name := handle.writehead_set(len(sets)):
        missing = handle.writehead_missing(len(sets))
        sets.append(InstructionSet(name.decode(), len(sets), missing.decode() if missing else None))
    return Library(path, handle, tuple(sets))
