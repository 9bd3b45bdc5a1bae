"""Several workers at the same work: alternated in rounds as far as they fit the memory together, else each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from writehead.bench.timing import median, ratio
from writehead.bench.worker import DiedError, RefusedError, Worker

MEASURED, REFUSED, DIED = "measured", "refused", "died"


@dataclass(slots=True)
class Outcome:
    """What a side did in one piece of work."""

    status: str = MEASURED
    reason: str = ""
    times: list[float] = field(default_factory=list)
    """Seconds, one a round; empty unless measured."""
    alternated: bool = True
    answer: dict[str, Any] = field(default_factory=dict)
    """What it said when the work was opened."""

    @property
    def seconds(self) -> float | None:
        """The median of the rounds."""
        return median(self.times) if self.times else None

    def ratio_to(self, base: Outcome | None) -> float | None:
        """Median over the rounds of this time / that of `base`; of the medians where they were not alternated."""
        if base is None or not base.times or not self.times:
            return None
        if self.alternated and base.alternated and len(self.times) == len(base.times):
            return ratio(self.times, base.times)
        return median(self.times) / median(base.times)


class Side:
    """One engine under comparison: a worker that is started again, and loaded again, after it died."""

    def __init__(self, name: str, start: Callable[[], Worker], load: Mapping[str, Any]) -> None:
        self.name, self._start, self._load = name, start, load
        self._worker: Worker | None = None
        self.loaded: dict[str, Any] = {}

    def worker(self) -> Worker:
        """The worker, loaded. Raises RefusedError or DiedError."""
        if self._worker is None:
            self._worker = self._start()
            try:
                self.loaded = self._worker.ask("load", **self._load)
            except BaseException:
                self.stop()
                raise
        return self._worker

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """As Worker.ask; a worker that dies is forgotten."""
        worker = self.worker()
        try:
            return worker.ask(do, **values)
        except DiedError:
            self.stop()
            raise

    def stop(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


@contextmanager
def stopping(sides: Sequence[Side]) -> Iterator[None]:
    """Stop the sides' workers at the end."""
    try:
        yield
    finally:
        for side in sides:
            side.stop()


Request = Mapping[str, Any]


NOTHING_TO_OPEN: Request = {"do": "close"}


def compare(
    sides: list[Side], request: Request, *, opening: Request = NOTHING_TO_OPEN, rounds: int
) -> dict[str, Outcome]:
    """Open the work on every side, measure in turns, close. The first round warms up.

    A side that is refused while others hold memory is tried again alone.
    """
    outcomes = {side.name: _open(side, opening) for side in sides}
    running = [side for side in sides if outcomes[side.name].status == MEASURED]
    _rounds(running, outcomes, request, rounds)
    for side in running:
        _close(side)
    for side in sides:
        if outcomes[side.name].status == REFUSED and any(other is not side for other in running):
            again = _open(side, opening)
            again.alternated = False
            if again.status == MEASURED:
                _rounds([side], {side.name: again}, request, rounds)
                _close(side)
            outcomes[side.name] = again
    return outcomes


def _open(side: Side, opening: Request) -> Outcome:
    return _try(Outcome(), lambda: side.ask(**opening))


def _rounds(sides: list[Side], outcomes: Mapping[str, Outcome], request: Request, rounds: int) -> None:
    for number in range(rounds + 1):
        for side in sides:
            outcome = outcomes[side.name]
            if outcome.status != MEASURED:
                continue
            answer = _try(outcome, lambda side=side: side.ask(**request)).answer  # type: ignore[misc]
            if number and outcome.status == MEASURED:
                outcome.times.append(answer["seconds"])


def _close(side: Side) -> None:
    with suppress(RefusedError, DiedError):
        side.ask("close")


def _try(outcome: Outcome, ask: Callable[[], dict[str, Any]]) -> Outcome:
    """Put the answer, or why there is none, into the outcome."""
    try:
        outcome.answer = {**outcome.answer, **ask()}
    except (RefusedError, DiedError) as error:
        outcome.status = REFUSED if isinstance(error, RefusedError) else DIED
        outcome.reason, outcome.times = str(error), []
    return outcome
