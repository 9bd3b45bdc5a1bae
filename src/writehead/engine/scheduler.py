"""Decides, step by step, how many tokens of which sequence the model reads next.

There are no phases: a prompt, a piece of it and one decoded token are all tokens granted to a sequence. Running sequences
come first, so that a long prompt never stalls them; what is left of the budget goes to prompts in the order of arrival.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from writehead.cache import KVCache
from writehead.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Grant:
    """The next `num_new` tokens of a sequence are computed in this step."""

    sequence: Sequence
    num_new: int

    @property
    def completes(self) -> bool:
        """Whether the step reads the sequence's last known token, so that the next one can be sampled."""
        return self.num_new == self.sequence.num_pending


@dataclass(frozen=True, slots=True)
class Step:
    """What was decided for one forward pass. Grants of equal size are adjacent and in the order of their rows."""

    grants: tuple[Grant, ...]


class Scheduler:
    """First come, first served, over the rows of the cache. Rows 0 to num_running - 1 are in use, without holes."""

    def __init__(self, cache: KVCache, *, max_step_tokens: int) -> None:
        assert max_step_tokens >= cache.num_rows, "a step must be able to decode every row"
        self.cache, self.max_step_tokens = cache, max_step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> Step | None:
        """The next step; None when nothing is left to do."""
        budget = self.max_step_tokens
        grants: list[Grant] = []
        for sequence in sorted(self.running, key=lambda s: s.num_pending > 1):
            num_new = min(sequence.num_pending, budget)
            if num_new:
                grants.append(Grant(sequence, num_new))
                budget -= num_new
        while self.waiting and budget and len(self.running) < self.cache.num_rows:
            sequence = self.waiting.popleft()
            sequence.row = len(self.running)
            self.running.append(sequence)
            num_new = min(sequence.num_pending, budget)
            grants.append(Grant(sequence, num_new))
            budget -= num_new
        return Step(tuple(sorted(grants, key=_order))) if grants else None

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence; the last row moves into its place."""
        if sequence.row is None:
            self.waiting.remove(sequence)
            return
        last = self.running.pop()
        assert last.row is not None
        if last is not sequence:
            self.cache.move(last.row, sequence.row, last.num_computed)
            self.running[sequence.row] = last
        self.cache.clear(last.row, max(last.num_computed, sequence.num_computed))
        if last is not sequence:
            # Slots past the mover's length still hold the finished sequence's numbers.
            self.cache.clear(sequence.row, sequence.num_computed, start=last.num_computed)
            last.row = sequence.row
        sequence.row = None


def _order(grant: Grant) -> tuple[int, int]:
    assert grant.sequence.row is not None
    return grant.num_new, grant.sequence.row
