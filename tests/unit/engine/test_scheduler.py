"""The scheduler against a fake model that writes down which token went into which slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.tiny import request, tokenizer
from writehead.cache import KVCache
from writehead.engine.scheduler import Scheduler, Step
from writehead.engine.sequence import Sequence

CAPACITY = 40


class FusedCache(KVCache):
    """Its work is interrupted when the fuse has burnt down, once."""

    fuse = 0

    def copy(self, source: int, target: int) -> None:
        self.burn()
        super().copy(source, target)
        self.burn()

    def free(self, row: int) -> None:
        self.burn()
        super().free(row)
        self.burn()

    def burn(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise KeyboardInterrupt


@dataclass
class Simulation:
    """Runs steps, and checks after each what must hold at all times."""

    num_rows: int
    max_step_tokens: int
    arrived: list[Sequence] = field(default_factory=list)
    num_ended: int = 0

    def __post_init__(self) -> None:
        self.cache = FusedCache(
            num_layers=1, num_kv_heads=1, slot_size=1, num_rows=self.num_rows, capacity=CAPACITY, dtype=torch.float32
        )
        self.scheduler = Scheduler(self.cache, max_step_tokens=self.max_step_tokens)

    def add(self, prompt: int, output: int) -> Sequence:
        name = len(self.arrived)
        sequence = Sequence(request([name % 60] * prompt, id=name, max_tokens=output), 0, tokenizer())
        self.arrived.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step | None:
        try:
            step = self.scheduler.schedule()
        except KeyboardInterrupt:
            step = self.scheduler.schedule()
        self.check_rows()
        if step is None:
            assert all(s.finish_reason for s in self.arrived)
            return None
        self.check_grants(step)
        for grant in step.grants:
            self.compute(grant.sequence, grant.num_new)
        return step

    def compute(self, sequence: Sequence, num_new: int) -> None:
        start, end, row = sequence.num_computed, sequence.num_computed + num_new, sequence.held_row
        self.cache.reserve(row, end)
        self.cache.keys[0][row, 0, start:end, 0] = torch.tensor([self.mark(sequence, p) for p in range(start, end)])
        if num_new == sequence.num_pending:
            sequence.append(1, None)
            self.num_ended += sequence.finish_reason is not None
        else:
            sequence.num_computed = end

    @staticmethod
    def mark(sequence: Sequence, position: int) -> float:
        return 100.0 * (sequence.request.id + 1) + position

    def check_rows(self) -> None:
        running = self.scheduler.running
        assert sorted(s.held_row for s in running) == list(range(len(running)))
        assert len(running) <= self.num_rows
        expected = torch.zeros(self.num_rows, CAPACITY)
        for s in running:
            expected[s.held_row, : s.num_computed] = torch.tensor([self.mark(s, p) for p in range(s.num_computed)])
        assert torch.equal(self.cache.keys[0][:, 0, :, 0], expected)
        admitted = [s for s in self.arrived if s in running]
        assert running == admitted, "running is in the order of arrival"

    def check_grants(self, step: Step) -> None:
        assert 0 < sum(grant.num_new for grant in step.grants) <= self.max_step_tokens
        order = [(grant.num_new, grant.sequence.held_row) for grant in step.grants]
        assert order == sorted(order)
        granted = {id(grant.sequence): grant.num_new for grant in step.grants}
        running = self.scheduler.running
        assert all(granted.get(id(s)) == 1 for s in running if s.num_pending == 1), "no decoding sequence ever waits"
        prompts = [s for s in running if s.num_pending > 1]
        served = [granted.get(id(s), 0) for s in prompts]
        full = [s.num_pending for s in prompts]
        cut = next((i for i, (a, b) in enumerate(zip(served, full, strict=True)) if a < b), len(full))
        assert served[:cut] == full[:cut], "prompts are read in the order of arrival"
        assert not any(served[cut + 1 :])
        if cut < len(full):
            assert sum(granted.values()) == self.max_step_tokens, "tokens are held back only when the step is full"


ADD = st.tuples(st.just("add"), st.integers(1, 25), st.integers(1, 10))
STEP = st.tuples(st.just("step"), st.integers(1, 4), st.just(0))
FUSE = st.tuples(st.just("fuse"), st.integers(1, 8), st.just(0))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0))


@settings(max_examples=150)
@given(st.integers(1, 5), st.integers(0, 12), st.lists(st.one_of(ADD, ADD, STEP, CANCEL, FUSE), max_size=25))
def test_any_order_of_arrivals_steps_cancels_and_interrupts(
    num_rows: int, spare: int, operations: list[tuple[str, int, int]]
) -> None:
    simulation = Simulation(num_rows, num_rows + spare)
    for name, first, second in operations:
        if name == "add":
            simulation.add(first, second)
        elif name == "step":
            for _ in range(first):
                simulation.step()
        elif name == "fuse":
            simulation.cache.fuse = first
        elif first < len(simulation.arrived) and simulation.arrived[first].finish_reason is None:
            simulation.arrived[first].finish_reason = "abort"
            simulation.num_ended += 1
    tokens_left = sum(s.num_prompt + 10 for s in simulation.arrived)
    for _ in range(tokens_left + 1):  # every step computes at least one token
        if simulation.step() is None:
            break
    else:
        raise AssertionError("starved")
    assert simulation.num_ended == len(simulation.arrived), "each ends exactly once"
    assert not simulation.scheduler.running
    assert not simulation.scheduler.waiting
    assert all(s.row is None for s in simulation.arrived)


def test_a_long_prompt_is_read_in_chunks_while_others_decode() -> None:
    simulation = Simulation(num_rows=2, max_step_tokens=8)
    short = simulation.add(prompt=3, output=10)
    simulation.step()
    long = simulation.add(prompt=20, output=1)
    steps = [simulation.step() for _ in range(3)]
    assert [[(g.sequence is long, g.num_new) for g in step.grants] for step in steps if step] == [
        [(False, 1), (True, 7)],
        [(False, 1), (True, 7)],
        [(False, 1), (True, 6)],
    ]
    assert (short.num_output, long.num_output, long.finish_reason) == (4, 1, "length")


def test_a_cancelled_sequence_that_waits_is_never_run() -> None:
    simulation = Simulation(num_rows=1, max_step_tokens=8)
    simulation.add(prompt=1, output=2)
    waiting = simulation.add(prompt=1, output=2)
    last = simulation.add(prompt=1, output=1)
    simulation.step()
    waiting.finish_reason = "abort"
    while simulation.step():
        pass
    assert (waiting.num_computed, waiting.num_output, last.num_output) == (0, 0, 1)
