"""How a file becomes training text: nothing is lost, nothing is added, everything is cut where it should be."""

from __future__ import annotations

import random

import pytest

from writehead.train.fim import FIM_PIECE_CHARS, fim, functions, line_pieces, render, seams
from writehead.train.vocabulary import END_OF_TEXT_ID, FIM_MIDDLE_ID, FIM_PREFIX_ID, FIM_SUFFIX_ID

SOURCE = "".join(f"def f{i}(x):\n    y = x + {i}\n\n    return y\n\n\n" for i in range(300))


def test_fim_keeps_every_character_in_both_orders() -> None:
    orders = []
    for seed in range(200):
        segments = fim("abcdefgh", random.Random(seed))
        if segments[1] == FIM_SUFFIX_ID:  # SPM: <prefix> <suffix> s <middle> p m
            assert [segments[0], segments[3]] == [FIM_PREFIX_ID, FIM_MIDDLE_ID]
            suffix, prefix, middle = segments[2], segments[4], segments[5]
        else:  # PSM: <prefix> p <suffix> s <middle> m
            assert segments[0::2] == [FIM_PREFIX_ID, FIM_SUFFIX_ID, FIM_MIDDLE_ID]
            prefix, suffix, middle = segments[1::2]
        assert f"{prefix}{middle}{suffix}" == "abcdefgh"
        orders.append(segments[1] == FIM_SUFFIX_ID)
    assert 70 < sum(orders) < 130


def test_line_pieces_are_whole_lines_of_bounded_length() -> None:
    pieces = line_pieces(SOURCE, random.Random(0))
    assert "".join(pieces) == SOURCE
    assert all(p.endswith("\n") for p in pieces)
    low, high = FIM_PIECE_CHARS
    assert all(low <= len(p) < high + 30 for p in pieces[:-1])
    assert len({len(p) for p in pieces}) > len(pieces) // 2


def test_seams_lose_nothing_and_fall_where_people_stop_typing() -> None:
    parts = [p for seed in range(20) for p in seams(SOURCE, random.Random(seed))[:-1]]
    assert "".join(str(s) for s in seams(SOURCE, random.Random(3))) == SOURCE
    at_lines = sum(str(p).rstrip(" ").endswith("\n") for p in parts)
    assert 0.7 < at_lines / len(parts) < 0.95
    assert any(str(p).endswith("\n    ") for p in parts)
    assert seams("", random.Random(0)) == []


def test_functions_come_dedented_with_decorators_and_without_the_rest() -> None:
    long = "def long():\n" + "    x = 1\n" * 10
    text = (
        "import os\n\n\nclass A:\n    x = 1\n\n    @staticmethod\n    def f(a):\n        def g():\n"
        "            return a\n        return g\n\n\x0c\nasync def h():\n    pass\n" + long
    )
    f = "@staticmethod\ndef f(a):\n    def g():\n        return a\n    return g\n"
    assert sorted(functions(text)) == [f, "async def h():\n    pass\n"]
    assert functions("let x = 1;") == []


@pytest.mark.parametrize(("fim_rate", "function_rate", "documents"), [(0.0, 0.0, 1), (0.0, 1.0, 300)])
def test_render_ends_every_document(fim_rate: float, function_rate: float, documents: int) -> None:
    segments = render(SOURCE, random.Random(0), fim_rate=fim_rate, function_rate=function_rate)
    assert [s for s in segments if isinstance(s, int)] == [END_OF_TEXT_ID] * documents
    assert segments[-1] == END_OF_TEXT_ID


def test_render_follows_the_rate_and_the_seed() -> None:
    def kinds(rate: float) -> int:
        texts = (render("x = 1\n", random.Random(i), fim_rate=rate, function_rate=0.0) for i in range(400))
        return sum(FIM_PREFIX_ID in t for t in texts)

    assert kinds(0.0) == 0
    assert kinds(1.0) == 400
    assert 140 < kinds(0.5) < 260
    once, again = (render(SOURCE, random.Random(5), fim_rate=1.0, function_rate=0.0) for _ in range(2))
    assert once == again
