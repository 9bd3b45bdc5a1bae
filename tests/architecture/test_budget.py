"""The size budgets of CONTRIBUTING.md: what no longer fits in one view is two things."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "writehead"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50


def over_budget(name: str, text: str) -> list[str]:
    """One line for each file or function in `text` that is longer than its budget."""
    offenders = []
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        offenders.append(f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                offenders.append(f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return offenders


def test_sources_are_within_budget() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert SOURCE / "errors.py" in paths
    offenders = [line for path in paths for line in over_budget(str(path.relative_to(SOURCE)), path.read_text("utf-8"))]
    assert not offenders, "split these:\n" + "\n".join(offenders)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 0\n" * 400, []),
        ("x = 0\n" * 401, ["m.py: 401 lines, at most 400"]),
        ("def f():\n" + "    x = 0\n" * 49, []),
        ("def f():\n" + "    x = 0\n" * 50, ["m.py:1: f has 51 lines, at most 50"]),
        ("class C:\n    async def g(self):\n" + "        x = 0\n" * 50, ["m.py:2: g has 51 lines, at most 50"]),
    ],
    ids=["file of 400", "file of 401", "function of 50", "function of 51", "method of 51"],
)
def test_the_count_is_exact(text: str, expected: list[str]) -> None:
    assert over_budget("m.py", text) == expected
