"""The cache: rows are copied whole, and what is free is zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from writehead.cache import KVCache
from writehead.errors import UsageError


def make(num_rows: int = 3, capacity: int = 5, **more: int) -> KVCache:
    sizes = {"num_layers": 2, "num_kv_heads": 2, "slot_size": 3, **more}
    return KVCache(num_rows=num_rows, capacity=capacity, dtype=torch.float32, **sizes)


def layers(cache: KVCache) -> tuple[Tensor, ...]:
    return (*cache.keys, *cache.values)


def write(cache: KVCache, row: int, end: int) -> None:
    """Give the slots of a row before `end` numbers of their own, a NaN among them."""
    cache.reserve(row, end)
    for tensor in layers(cache):
        tensor[row, :, :end] = torch.randn(2, end, 3)
        tensor[row, :, end - 1 : end, 0] = torch.nan


def test_it_is_zero_and_has_the_size_it_says() -> None:
    cache = make(num_rows=4, capacity=7)
    assert [t.shape for t in layers(cache)] == [(4, 2, 7, 3)] * 4
    assert all(not t.any() for t in layers(cache))
    assert cache.num_bytes == 2 * 2 * 4 * 2 * 7 * 3 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_take_half_the_bytes(dtype: torch.dtype) -> None:
    cache = KVCache(num_layers=1, num_kv_heads=1, slot_size=8, num_rows=2, capacity=4, dtype=dtype)
    assert cache.keys[0].dtype == dtype
    assert cache.num_bytes == 2 * 2 * 4 * 8 * 2


Operation = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 5)),
    st.tuples(st.just("free"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("copy"), st.integers(0, 2), st.integers(0, 2)).filter(lambda o: o[1] != o[2]),
)


@given(st.lists(Operation, max_size=12))
def test_rows_keep_their_content_and_free_slots_are_zero(operations: list[tuple[str, int, int]]) -> None:
    cache = make()
    expected = [t.clone() for t in layers(cache)]
    for name, row, argument in operations:
        if name == "write":
            write(cache, row, argument)
            for mine, theirs in zip(expected, layers(cache), strict=True):
                mine[row, :, :argument] = theirs[row, :, :argument]
        elif name == "free":
            cache.free(row)
            for mine in expected:
                mine[row] = 0
        else:
            cache.copy(row, argument)
            for mine in expected:
                mine[argument] = mine[row]
        for mine, theirs in zip(expected, layers(cache), strict=True):
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_a_row_has_no_slot_beyond_its_capacity() -> None:
    with pytest.raises(AssertionError, match="slot 5 of a row of 5"):
        make().reserve(0, 6)


@pytest.mark.parametrize("capacity", [2**48, 2**62])
def test_memory_that_the_system_does_not_grant_is_one_sentence(capacity: int) -> None:
    with pytest.raises(UsageError, match=r"needs [\d.]+ GiB, which the system does not grant; lower max_num_seqs or"):
        make(num_rows=1, capacity=capacity)
