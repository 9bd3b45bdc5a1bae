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
ABI = 5


class Weight(Structure):
    """`struct Weight`."""

    _fields_ = (
        ("data", c_void_p), ("rows", c_int64), ("columns", c_int64), ("kind", c_int32), ("group", c_int32),
    )  # fmt: skip


class Linear(Structure):
    """`struct Linear`."""

    _fields_ = (
        ("weight", c_void_p), ("m", c_int64), ("x", c_void_p), ("bias", c_void_p), ("residual", c_void_p),
        ("y", c_void_p), ("activation", c_int32),
    )  # fmt: skip


class Norm(Structure):
    """`struct Norm`."""

    _fields_ = (
        ("tokens", c_int64), ("heads", c_int64), ("size", c_int64), ("stride", c_int64), ("x", c_void_p),
        ("weight", c_void_p), ("bias", c_void_p), ("y", c_void_p), ("eps", c_float), ("offset", c_float),
        ("rms", c_int32),
    )  # fmt: skip


class Activate(Structure):
    """`struct Activate`."""

    _fields_ = (
        ("m", c_int64), ("size", c_int64), ("x", c_void_p), ("y", c_void_p), ("activation", c_int32),
        ("gated", c_int32),
    )  # fmt: skip


class Rotate(Structure):
    """`struct Rotate`."""

    _fields_ = (
        ("tokens", c_int64), ("heads", c_int64), ("dim", c_int64), ("stride", c_int64), ("half", c_int64),
        ("x", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("y", c_void_p),
    )  # fmt: skip


class Store(Structure):
    """`struct Store`."""

    _fields_ = (
        ("tokens", c_int64), ("kv_heads", c_int64), ("dim", c_int64), ("k_stride", c_int64), ("v_stride", c_int64),
        ("capacity", c_int64), ("k", c_void_p), ("v", c_void_p), ("rows", c_void_p), ("slots", c_void_p),
        ("keys", c_void_p), ("values", c_void_p), ("kind", c_int32),
    )  # fmt: skip


class Attention(Structure):
    """`struct Attention`."""

    _fields_ = (
        ("q", c_void_p), ("out", c_void_p), ("keys", c_void_p), ("values", c_void_p),
        ("first_token", c_void_p), ("num_new", c_void_p), ("row", c_void_p), ("length", c_void_p), ("bias", c_void_p),
        ("sequences", c_int64), ("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64), ("q_stride", c_int64),
        ("capacity", c_int64), ("window", c_int64), ("bias_stride", c_int64), ("scale", c_float), ("kind", c_int32),
    )  # fmt: skip


class Call(Structure):
    """`struct Call`."""

    _fields_ = (("operation", c_void_p), ("arguments", c_void_p))


Operation = CFUNCTYPE(None, c_void_p)
"""Takes a pointer to its struct."""

_W, _P = POINTER(Weight), c_void_p


class Ops(Structure):
    """`struct Ops`: the functions of one instruction set."""

    _fields_ = (
        ("packed_bytes", CFUNCTYPE(c_int64, _W)), ("pack", CFUNCTYPE(None, _W, _P, c_int32, c_int64)),
        ("embed", CFUNCTYPE(c_int32, _W, c_int64, _P, _P)), ("linear", Operation), ("norm", Operation),
        ("activate", Operation), ("rotate", Operation), ("store", Operation), ("attention", Operation),
    )  # fmt: skip


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
    return open_file(path)


def open_file(path: Path) -> Library | str:
    """The library in a file, or one sentence why it cannot be used."""
    try:
        handle = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        return f"the native library {path} cannot be opened: {error}"
    if handle.writehead_abi() != ABI:
        return f"the native library {path} is of another version of writehead: install writehead again"
    handle.writehead_set.restype = handle.writehead_missing.restype = c_char_p
    handle.writehead_ops.restype = POINTER(Ops)
    handle.writehead_replay.argtypes = POINTER(Call), c_int64
    handle.writehead_replay.restype = None
    sets: list[InstructionSet] = []
    while name := handle.writehead_set(len(sets)):
        missing = handle.writehead_missing(len(sets))
        sets.append(InstructionSet(name.decode(), len(sets), missing.decode() if missing else None))
    return Library(path, handle, tuple(sets))
