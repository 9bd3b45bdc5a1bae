"""Steps kept: the native calls of a step, recorded once and then repeated by one call.

Between two operations Python takes longer than a small operation does. Which operations a step calls, and on what
memory, depends on its shape alone. So the calls are kept with all that they point to, and a later step of that shape
copies its inputs there and repeats them. What could make that wrong, and what sees it:

    something other than an operation computes in between     Watch, while recording: such a step is never kept
    a weight, a module, a setting or a hook is another one    State, before each step
    another cache or other numbers of tokens                  step_key
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from ctypes import Structure, addressof, c_void_p, cast
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from writehead.kernels.contract import Blocks, CacheView, Rotation
from writehead.kernels.cpu.library import Call, Library
from writehead.kernels.packed import PackedWeight

MAX_TOKENS = 8
"""Of a step that is kept: beyond, Python hardly matters, and what lies between the operations is no longer small."""

_MAX_PROGRAMS = 4
_OF_ANY_MODULE = vars(nn.Module()).keys()
_ALLOCATIONS = {getattr(torch.ops.aten, name) for name in ("empty", "new_empty", "empty_like", "empty_strided")}


def sequences_of(cache: CacheView) -> tuple[Tensor, ...]:
    """int64: first token, new tokens, cache row and length of each sequence of a step."""
    counts = torch.tensor([g.num_new for g in cache.groups for _ in g.lengths])
    first = counts.cumsum(0) - counts
    return first, counts, cache.rows[first], torch.tensor(_lengths(cache))


def step_key(x: Tensor, rotation: Rotation | None, cache: CacheView) -> Hashable:
    """What a step shares with those that make the same calls: its shape, and where its cache lies in memory."""
    return (
        x.shape, rotation and rotation[0].shape, tuple([(g.num_new, len(g.lengths)) for g in cache.groups]),
        cache.keys[0].shape, cache.keys[0].dtype, tuple([t.data_ptr() for t in (*cache.keys, *cache.values)]),
    )  # fmt: skip


class Program:
    """The calls of one step and the memory that they use, but for the cache, whose owner passes it at each step."""

    def __init__(self, x: Tensor, rotation: Rotation | None, cache: CacheView) -> None:
        self.x = x.clone()
        self.rotation = None if rotation is None else (rotation[0].clone(), rotation[1].clone())
        self.cache = dataclasses.replace(cache, rows=cache.rows.clone(), slots=cache.slots.clone())
        self.sequences = sequences_of(self.cache)
        self._inputs = (self.x, *(self.rotation or ()), self.cache.rows, self.cache.slots)
        self._kept: list[object] = []
        self._calls: list[tuple[int | None, Structure]] = []

    def add(self, operation: Any, arguments: Structure, operands: tuple[Tensor | PackedWeight | None, ...]) -> None:
        """Keep a call and the memory of its operands, also when a parameter is given other memory later."""
        self._calls.append((cast(operation, c_void_p).value, arguments))
        self._kept += [t.untyped_storage() if isinstance(t, Tensor) else t for t in operands]

    def record(self, blocks: Blocks) -> tuple[Tensor, bool]:
        """Run it on this program's inputs, while its calls are added -> the result, and whether it can be repeated."""
        with Watch() as watch:
            out = blocks(self.x, self.rotation, self.cache)
        self._array = (Call * len(self._calls))(*[Call(f, addressof(arguments)) for f, arguments in self._calls])
        self._out = out
        return out.clone(), not watch.computed

    def replay(self, library: Library, x: Tensor, rotation: Rotation | None, cache: CacheView) -> Tensor:
        """The result for other inputs of the same key."""
        for own, given in zip(self._inputs, (x, *(rotation or ()), cache.rows, cache.slots), strict=True):
            own.copy_(given)
        first, _, rows, lengths = self.sequences
        torch.index_select(cache.rows, 0, first, out=rows)
        lengths.copy_(torch.tensor(_lengths(cache)))
        library.handle.writehead_replay(self._array, len(self._array))
        return self._out.clone()


class Watch(TorchDispatchMode):
    """Sees whether torch does anything but take memory and look at it in another shape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch wraps what follows, and the first call imports its compiler: a second in the midst of a text."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _ALLOCATIONS:
            found = tree_leaves(out)
            views = bool(found) and _storages(found) <= _storages(tree_leaves((args, kwargs)))
            self.computed |= func._schema.is_mutable or not views
        return out


class State:
    """What the modules in one consist of, to see whether they still do: parameters, modules, settings, hooks."""

    def __init__(self, owner: nn.Module) -> None:
        modules = list(owner.modules())
        places: list[tuple[dict[str, Any], str]]
        places = [(d, key) for m in modules for d in (m._parameters, m._buffers, m._modules) for key in d]
        places += [(vars(m), key) for m in modules for key in ("forward", *vars(m).keys() - _OF_ANY_MODULE)]
        self._dicts, self._keys = [d for d, _ in places], [key for _, key in places]
        self._values = [*map(dict.get, self._dicts, self._keys)]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._pointers = [t.data_ptr() for t in self._tensors]
        self._hooks: list[Any] = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks += [hooks_of_all._global_forward_hooks, hooks_of_all._global_forward_pre_hooks]

    def holds(self) -> bool:
        """Whether every value is the same object at the same place, and nothing hooks into a call."""
        same = all(map(is_, map(dict.get, self._dicts, self._keys), self._values))
        return same and [t.data_ptr() for t in self._tensors] == self._pointers and not any(self._hooks)


class Programs:
    """What is kept for one module: the programs that were used last; None for a step that cannot be repeated."""

    def __init__(self, owner: nn.Module) -> None:
        self.state = State(owner)
        self._last: Hashable = None
        self._found: OrderedDict[Hashable, Program | None] = OrderedDict()

    def find(self, key: Hashable) -> tuple[Program | None, bool]:
        """The program for a key; whether to record one: if the step before had the same key and none was tried."""
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key], False
        again, self._last = key == self._last, key
        return None, again

    def keep(self, key: Hashable, program: Program | None) -> None:
        """Remember it in place of the one not used for longest."""
        self._found[key] = program
        if len(self._found) > _MAX_PROGRAMS:
            self._found.popitem(last=False)


def _lengths(cache: CacheView) -> list[int]:
    return [n for g in cache.groups for n in g.lengths]


def _storages(values: list[Any]) -> set[int]:
    """The memory of tensors; of another result a place that no tensor has."""
    return {v.untyped_storage()._cdata if isinstance(v, Tensor) else -1 for v in values}
