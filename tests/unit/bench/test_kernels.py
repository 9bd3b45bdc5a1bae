"""`writehead bench kernels`: bytes and operations are the shapes', shares are the measured limits'."""

from __future__ import annotations

import pytest
import torch

from tests.unit.bench.conftest import Measure
from tests.unit.cli.conftest import Run
from writehead import kernels
from writehead.bench import cost
from writehead.bench.limits import Limits
from writehead.bench.limits import measure as measure_limits
from writehead.kernels import AttentionSpec, CacheView, Group

LIMITS = Limits(buffer_bytes=1, read_gb_s=10.0, fp32_gop_s=100.0, bf16_gop_s=50.0, int8_gop_s=400.0)


def test_figures_agree(measure: Measure) -> None:
    found = measure(
        "kernels", "-m", "random:tiny", "--rows", "1,8", "--attention", "2x50", "--seconds", "0.002", "--buffer", "8"
    )
    limits = found["limits"]
    assert limits["buffer_bytes"] == 8 << 20
    rows = {(row["op"], row["of"], row["rows"]): row for row in found["rows"]}
    assert len(rows) == 5 * 2 + 2 + 1
    for row in rows.values():
        assert row["gb_s"] == pytest.approx(row["mbytes"] / row["us"] * 1e3, rel=1e-4)
        assert row["bandwidth"] == pytest.approx(row["gb_s"] / limits["read_gb_s"], rel=1e-4)
        assert row["share"] == pytest.approx(max(row["bandwidth"], row["arithmetic"]), rel=1e-4)
    up = rows["linear", "mlp.up", 8]
    assert up["mbytes"] == pytest.approx(4e-6 * (64 * 256 + 256 + 8 * (64 + 256)))
    assert up["gop_s"] * up["us"] * 1e3 == pytest.approx(2 * 8 * 64 * 256, rel=1e-4)
    attention = rows["cached_attention", "2 x 50", 2]
    assert attention["mbytes"] == pytest.approx(4e-6 * (2 * 2 * 50 * 16 + 2 * 2 * 64))
    assert attention["gop_s"] * attention["us"] * 1e3 == pytest.approx(4 * 2 * 50 * 64, rel=1e-4)


def test_an_int8_cache_moves_its_bytes(measure: Measure) -> None:
    """A head of 16 numbers takes 20 bytes in a slot."""
    sizes = ("--rows", "1", "--attention", "2x50", "--seconds", "0.002", "--buffer", "8")
    found = measure("kernels", "-m", "random:tiny", *sizes, "--kv-cache-dtype", "int8")
    (row,) = (row for row in found["rows"] if row["op"] == "cached_attention")
    assert row["mbytes"] == pytest.approx(1e-6 * (2 * 2 * 50 * 20 + 4 * 2 * 2 * 64))


@pytest.mark.parametrize("window", [None, 4])
def test_the_cost_of_attention_counts_what_each_query_sees(window: int | None) -> None:
    """Two sequences of 3 new tokens each, 3 and 10 long, against a count of pairs one by one."""
    keys = torch.zeros(2, 1, 16, 8)
    groups = (Group(num_new=3, rows=slice(0, 2), lengths=(3, 10)),)
    view = CacheView(keys=(keys,), values=(keys,), rows=torch.zeros(6), slots=torch.zeros(6), groups=groups)
    q = torch.zeros(6, 4, 8)
    seen = [
        {key for key in range(p + 1) if window is None or key > p - window}
        for length in (3, 10)
        for p in range(length - 3, length)
    ]
    found = cost.of("cached_attention", (q, view, 0, AttentionSpec(scale=1.0, window=window)), q)
    assert found.ops == 4 * 4 * 8 * sum(map(len, seen))
    slots = len(set.union(*seen[:3])) + len(set.union(*seen[3:]))
    assert found.bytes == 4 * (2 * 8 * slots + 2 * q.numel())


def test_the_limit_is_the_slower_of_moving_and_computing() -> None:
    assert LIMITS.seconds(cost.Cost(10**10, 0)) == (1.0, "bandwidth")
    assert LIMITS.seconds(cost.Cost(10**9, 2 * 10**11)) == (2.0, "arithmetic")
    assert LIMITS.seconds(cost.Cost(0, 4 * 10**11, "int8")) == (1.0, "arithmetic")
    assert LIMITS.gop_s("bf16") == 100.0  # a slow product of its own is no limit: fp32's can be used


def test_limits_grow_with_what_they_measure() -> None:
    limits = measure_limits(seconds=0.01, buffer_bytes=4 << 20, side=128)
    assert limits.read_gb_s > 0.1
    assert limits.fp32_gop_s > 0.1
    a = torch.ones(8, 8, dtype=torch.int8)
    assert (limits.int8_gop_s is not None) == bool((torch._int_mm(a, a) == 8).all())


def test_a_cost_moves_what_the_operation_moves() -> None:
    backend = kernels.load("reference")
    x, weight, bias = torch.zeros(2, 3, 8), torch.zeros(5, 8), torch.zeros(5)
    out = backend.linear(x, weight, bias)
    assert cost.of("linear", (x, weight, bias), out) == cost.Cost(4 * (48 + 40 + 5 + 30), 2 * 6 * 8 * 5, "fp32")
    assert cost.of("linear", (x, weight.bfloat16(), None), out).dtype == "bf16"
    assert cost.of("linear", (x, weight.to(torch.int8), None), out).dtype == "int8"
    assert cost.of("rms_norm", (x, weight[0], 1e-5, 0.0), x) == cost.Cost(4 * (48 + 8 + 48), 0)


def test_a_grid_is_pairs(run: Run) -> None:
    for wrong in ("5", "1x2x3", "1x", "ax3"):
        done = run("bench", "kernels", "-m", "random:tiny", "--attention", wrong)
        assert (done.code, done.out) == (2, "")
        assert "--attention is " in done.err
