"""Decides, step by step, how many tokens of which sequence the model reads next.

There are no phases: a prompt, a piece of it and one decoded token are all tokens granted to a sequence. Sequences with
one token to go come first, so a long prompt never stalls them; what is left goes to prompts in the order of arrival.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from writehead.cache import KVCache
from writehead.engine.sequence import Sequence

STEP_TOKENS = 512
"""Unless told otherwise: enough to keep the products busy, few enough that what lies between stays in caches."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The next `num_new` tokens of a sequence are computed in this step."""

    sequence: Sequence
    num_new: int

    @property
    def completes(self) -> bool:
        """Whether the step reads the sequence's last known token, so that the next one can be chosen."""
        return self.num_new == self.sequence.num_pending


@dataclass(frozen=True, slots=True)
class Step:
    """What was decided for one forward pass. Grants of equal size are adjacent and in the order of their rows."""

    grants: tuple[Grant, ...]


class Scheduler:
    """First come, first served, over the rows of the cache.

    Rows 0 to len(running) - 1 are in use, without holes. A sequence that has ended keeps its row until the next
    `schedule`, the only place where rows change hands: what a step was told about rows holds until it is over. An
    interrupt may come anywhere: each method does nothing that it could not do again.
    """

    def __init__(self, cache: KVCache, *, max_step_tokens: int | None = None) -> None:
        max_step_tokens = max_step_tokens or max(STEP_TOKENS, cache.num_rows)
        assert max_step_tokens >= cache.num_rows, "a step must be able to advance every row"
        self.cache, self.max_step_tokens = cache, max_step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of arrival."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> Step | None:
        """The next step; None when nothing is left to do."""
        self._release()
        self._admit()
        budget = self.max_step_tokens
        grants: list[Grant] = []
        for sequence in sorted(self.running, key=lambda s: s.num_pending > 1):
            num_new = min(sequence.num_pending, budget)
            if num_new:
                grants.append(Grant(sequence, num_new))
                budget -= num_new
        return Step(tuple(sorted(grants, key=_order))) if grants else None

    def _release(self) -> None:
        """Free the rows of sequences that have ended; the last rows move into the holes."""
        live = [s for s in self.running if s.finish_reason is None]
        if len(live) == len(self.running):
            return
        held = {s.held_row for s in live}
        holes = (row for row in range(len(live)) if row not in held)
        for sequence in live:
            if sequence.held_row >= len(live):
                hole = next(holes)
                self.cache.copy(sequence.held_row, hole)
                sequence.row = hole
        for row in range(len(live), self.cache.num_rows):
            self.cache.free(row)
        for sequence in self.running:
            if sequence.finish_reason is not None:
                sequence.row = None
        self.running = live

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.cache.num_rows:
            sequence = self.waiting[0]
            if sequence.finish_reason is None and sequence not in self.running:
                sequence.row = len(self.running)
                self.running.append(sequence)
            self.waiting.popleft()


def _order(grant: Grant) -> tuple[int, int]:
    return grant.num_new, grant.sequence.held_row
