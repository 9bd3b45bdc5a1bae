"""Where the time of a step goes: every call of the kernels as a span, without a change to the engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from writehead.bench import cost
from writehead.bench.cost import Cost
from writehead.engine.engine import Engine
from writehead.models.decoder import Decoder

KERNEL, LAYER, DECODER, STEP = "kernel", "layer", "decoder", "step"


@dataclass(frozen=True, slots=True)
class Span:
    """One call. Times in nanoseconds of the recorder's clock."""

    kind: str
    name: str
    of: str
    """Where in the model, without the layer: `attn.qkv`."""
    layer: int | None
    start: int
    end: int
    cost: Cost = cost.NOTHING

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.end - self.start


class Recorder:
    """Collects spans. Its clock stands still while it writes down what it saw, so that it is in no span."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._lost = 0

    def now(self) -> int:
        """Nanoseconds, without what the recorder itself took."""
        return time.perf_counter_ns() - self._lost

    def add(self, kind: str, name: str, where: str, start: int, cost_of: Callable[[], Cost] | None = None) -> None:
        """A call that began at `start` and ends now, by a module of that name."""
        stopped = time.perf_counter_ns()
        layer, of = _place(where or ("lm_head" if name == "linear" else ""))  # the decoder applies a tied head
        found = cost_of() if cost_of is not None else cost.NOTHING
        self.spans.append(Span(kind, name, of, layer, start, stopped - self._lost, found))
        self._lost += time.perf_counter_ns() - stopped


class Timed:
    """Stands in for an object and records each call of its methods (or of those in `only`); all else passes through."""

    def __init__(
        self, inner: object, recorder: Recorder, kind: str, where: str, *, only: Collection[str] | None = None
    ) -> None:
        self._inner, self._recorder, self._kind, self._where, self._only = inner, recorder, kind, where, only

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value) or (self._only is not None and name not in self._only):
            return value
        recorder, kind, where = self._recorder, self._kind, self._where

        def call(*arguments: Any, **more: Any) -> Any:
            start = recorder.now()
            out = value(*arguments, **more)
            given = (*arguments, *more.values())
            recorder.add(kind, name, where, start, (lambda: cost.of(name, given, out)) if kind == KERNEL else None)
            return out

        self.__dict__[name] = call  # the next call finds it at once
        return call


class TimedKernels(Timed):
    """The kernels of one module. A step is never repeated as a whole: each operation is called, and seen."""

    def run(self, _owner: object, blocks: Callable[..., Any], *inputs: Any) -> Any:
        """The contract's."""
        return blocks(*inputs)


@contextmanager
def recording(engine: Engine, recorder: Recorder) -> Iterator[None]:
    """Within it, every step of the engine is recorded: kernels, layers, and the decoder around them."""
    decoder = engine.decoder
    modules = list(decoder.named_modules())
    plain = [(module, module.kernels) for _, module in modules if "kernels" in vars(module)]
    layers = enumerate(decoder.layers)
    hooks = [hook for number, layer in layers for hook in _hooks(f"layers.{number}", layer, recorder)]
    for name, module in modules:
        if "kernels" in vars(module):
            module.kernels = cast(Any, TimedKernels(module.kernels, recorder, KERNEL, name))
    engine.decoder = cast(Decoder, Timed(decoder, recorder, DECODER, "", only=("hidden", "logits")))
    try:
        yield
    finally:
        engine.decoder = decoder
        for module, kernels in plain:
            module.kernels = kernels
        for hook in hooks:
            hook.remove()


def _hooks(name: str, layer: Any, recorder: Recorder) -> list[Any]:
    """What sees a layer begin and end."""
    starts: list[int] = []

    def begin(*_: object) -> None:
        starts.append(recorder.now())

    def end(*_: object) -> None:
        recorder.add(LAYER, "layer", name, starts.pop())

    return [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]


def _place(where: str) -> tuple[int | None, str]:
    """`layers.3.attn.qkv` -> 3, `attn.qkv`."""
    found = re.fullmatch(r"layers\.(\d+)\.?(.*)", where)
    return (int(found[1]), found[2]) if found else (None, where)
