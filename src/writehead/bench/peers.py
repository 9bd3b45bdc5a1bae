"""Other engines on the same checkpoint and the same work, in the same run: who is faster here, and by how much."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from writehead.bench import machine, peer_process
from writehead.bench.child import OWN
from writehead.bench.plot import Plot
from writehead.bench.report import Report
from writehead.bench.sides import Outcome, Side, compare
from writehead.bench.sweep import COMMAND
from writehead.bench.worker import DiedError, RefusedError, Worker
from writehead.errors import UsageError

COLUMNS = {
    "work": "decode:BATCHxCONTEXT, or prefill:TOKENS of one prompt",
    "engine": "writehead with its weights, or a peer with its own",
    "status": "measured; skipped: it is not here; refused: it cannot do this; died: the process ended",
    "ms": "milliseconds of a decoding step, or of the whole prefill, median over the rounds",
    "tok_s": "tokens generated, or read, in a second",
    "ratio": "time of the first writehead / this time, median over the rounds: below 1, writehead is faster",
    "alternated": "whether it took turns with the others; not if they do not fit the memory together",
    "reason": "why it was not measured",
}

PLOT = Plot(x="work", y="tok_s", by=("engine",), label="tokens in a second", log=True)

SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine with one kind of weights."""

    engine: str
    dtype: str
    suffix: str
    """Behind the checkpoint's path stands where its converted model is looked for; empty: it reads the checkpoint."""


PEERS: Mapping[str, Peer] = {
    "transformers-fp32": Peer("transformers", "fp32", ""),
    "transformers-bf16": Peer("transformers", "bf16", ""),
    "ctranslate2-int8": Peer("ctranslate2", "int8", "-ct2-int8"),
    "llamacpp-q8_0": Peer("llamacpp", "q8_0", "-q8_0.gguf"),
    "llamacpp-q4_0": Peer("llamacpp", "q4_0", "-q4_0.gguf"),
    "openvino-int8": Peer("openvino", "int8", "-ov-int8"),
    "openvino-int4": Peer("openvino", "int4", "-ov-int4"),
}


@dataclass(frozen=True, slots=True)
class Work:
    """Decoding at a batch and context, or (batch 0) reading a prompt of that length."""

    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """As --work spells it."""
        return f"decode:{self.batch}x{self.tokens}" if self.batch else f"prefill:{self.tokens}"

    def request(self, steps: int, rounds: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What is measured, and what is opened before."""
        if not self.batch:
            return {"do": "prefill", "batch": 1, "tokens": self.tokens, "capacity": self.tokens + 2}, None
        capacity = self.tokens + (rounds + 1) * steps + 1
        opening = {"do": "open", "batch": self.batch, "context": self.tokens, "capacity": capacity}
        return {"do": "decode", "steps": steps}, opening


DEFAULT_WORK = (Work(1, 128), Work(16, 128), Work(64, 128), Work(1, 1900), Work(16, 1900), Work(0, 128), Work(0, 1900))


def parse_work(text: str) -> Work:
    """`decode:16x128` or `prefill:1900`. Raises UsageError."""
    kind, _, size = text.partition(":")
    numbers = size.split("x")
    if (kind, len(numbers)) in {("decode", 2), ("prefill", 1)} and all(n.isdecimal() and int(n) for n in numbers):
        return Work(int(numbers[0]), int(numbers[1])) if kind == "decode" else Work(0, int(size))
    raise UsageError(f"--work is '{text}'; expected decode:BATCHxCONTEXT or prefill:TOKENS, such as decode:16x128")


def parse_peers(words: Seq[str], model: Path) -> dict[str, Path]:
    """`NAME` or `NAME=PATH` -> where each peer's model is; all of them if none is named. Raises UsageError."""
    found = {}
    for word in words or list(PEERS):
        name, _, path = word.partition("=")
        if name not in PEERS:
            raise UsageError(f"--peer is '{word}'; there are {', '.join(PEERS)}")
        found[name] = Path(path) if path else model.with_name(model.name + PEERS[name].suffix)
    return found


def own_sides(model: str, weights: Seq[str], *, kernels: str, kv_cache_dtype: str = "auto", seed: int) -> list[Side]:
    """writehead with each kind of weights."""
    return [
        Side(
            f"writehead-{name}", partial(Worker, name, COMMAND),
            {"model": model, "heads": OWN, "weights": name, "kernels": kernels, "kv_cache_dtype": kv_cache_dtype,
             "seed": seed},
        )
        for name in weights
    ]  # fmt: skip


def peer_sides(paths: Mapping[str, Path], *, python: Path | None, vocab: int, seed: int) -> list[Side]:
    """A side for each peer; `python` is the interpreter of an environment that has them (default: this one)."""
    load = {"vocab": vocab, "seed": seed, "threads": machine.usable_cores()}
    return [
        Side(
            name, partial(Worker, name, (str(python or sys.executable), peer_process.__file__, PEERS[name].engine)),
            {"model": str(path), "dtype": PEERS[name].dtype, **load},
        )
        for name, path in paths.items()
    ]  # fmt: skip


def measure(
    report: Report, own: list[Side], others: list[Side], paths: Mapping[str, Path], works: Seq[Work], *,
    steps: int, rounds: int,
) -> dict[str, str]:  # fmt: skip
    """Rows for each work and engine -> which peers were skipped, and why. The first own side is what is compared."""
    skipped: dict[str, str] = {}
    for side in own:
        _load_own(side)
    for side in others:
        reason = _unavailable(side, paths[side.name])
        if reason:
            skipped[side.name] = reason
            report.add(engine=side.name, status=SKIPPED, reason=reason)
    sides = [*own, *(side for side in others if side.name not in skipped)]
    for work in works:
        request, opening = work.request(steps, rounds)
        opened = {} if opening is None else {"opening": opening}
        outcomes = compare(sides, request, **opened, rounds=rounds)
        _add_rows(report, work, outcomes, outcomes[own[0].name])
    return skipped


def _load_own(side: Side) -> None:
    try:
        side.worker()
    except (RefusedError, DiedError) as error:
        raise UsageError(f"{side.name}: {error}") from None


def _unavailable(side: Side, path: Path) -> str:
    """Why a peer cannot run here; empty if it can, and then it is loaded."""
    if not path.exists():
        return f"there is no model at {path}; convert one as docs/benchmarks shows, or name it: --peer {side.name}=PATH"
    try:
        side.worker()
    except (RefusedError, DiedError) as error:
        return str(error)
    return ""


def _add_rows(report: Report, work: Work, outcomes: Mapping[str, Outcome], ours: Outcome) -> None:
    tokens = work.batch or work.tokens
    for name, outcome in outcomes.items():
        seconds, slower = outcome.seconds, ours.ratio_to(outcome)
        report.add(
            work=work.name, engine=name, status=outcome.status, ms=seconds and 1e3 * seconds,
            tok_s=seconds and tokens / seconds, ratio=slower, alternated=outcome.alternated, reason=outcome.reason,
        )  # fmt: skip
