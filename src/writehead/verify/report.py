"""What was compared and how far apart it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from writehead.errors import VerificationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison."""

    name: str
    difference: float
    """The largest absolute difference."""
    relative: float
    """The same, divided by the range (largest minus smallest) of the numbers that were compared with."""
    tolerance: float
    """The largest relative difference that passes."""
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All comparisons of one checkpoint."""

    model: str
    oracle: str
    """What the numbers were compared with, and how it got its weights."""
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether every comparison passed."""
        return all(row.passed for row in self.rows)

    def raise_if_failed(self) -> None:
        """Raise VerificationError that names every row that failed."""
        failed = [row for row in self.rows if not row.passed]
        if failed:
            listed = "; ".join(f"{r.name}: {r.relative:.3g} where {r.tolerance:.3g} is allowed" for r in failed)
            raise VerificationError(
                f"{self.model}: {len(failed)} of {len(self.rows)} comparisons failed ({listed}); "
                "do not trust what this model generates here until they pass"
            )

    def table(self) -> str:
        """The rows as aligned text, and a verdict."""
        cells = [("comparison", "largest difference", "relative", "allowed", "result", "")]
        for r in self.rows:
            numbers = (f"{r.difference:.3g}", f"{r.relative:.3g}", f"{r.tolerance:.3g}")
            cells.append((r.name, *numbers, "pass" if r.passed else "FAIL", r.detail))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            f"{name:<{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}  {c:>{widths[3]}}  {result:<6}  {detail}".rstrip()
            for name, a, b, c, result, detail in cells
        ]
        failed = sum(not r.passed for r in self.rows)
        verdict = f"{failed} of {len(self.rows)} comparisons FAILED" if failed else f"all {len(self.rows)} passed"
        return "\n".join([f"{self.model} against {self.oracle}", "", *lines, "", verdict])


def largest(values: Sequence[Tensor]) -> float:
    """The largest number of several tensors; NaN if any is NaN, which Python's max() would overlook."""
    return float(torch.stack([v.max() for v in values]).max())


def spread(tensors: Sequence[Tensor]) -> float:
    """The largest number minus the smallest."""
    return largest(tensors) + largest([-t for t in tensors])


def judge(name: str, difference: float, width: float, *, tolerance: float, detail: str) -> Row:
    """A row that passes if `difference` is a small enough share of `width`. NaN and a width of 0 fail."""
    relative = difference / width if width > 0 else math.nan
    if math.isnan(relative):
        detail = f"{detail}; not comparable: there are NaNs, or all logits are equal"
    return Row(
        name=name,
        difference=difference,
        relative=relative,
        tolerance=tolerance,
        passed=relative <= tolerance,
        detail=detail,
    )


def compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor], *, tolerance: float, detail: str) -> Row:
    """Two lists of logits of equal shapes, number by number, relative to the range of what is expected."""
    assert [t.shape for t in found] == [t.shape for t in expected], f"{name}: the shapes differ"
    difference = largest([(a - b).abs() for a, b in zip(found, expected, strict=True)])
    return judge(name, difference, spread(expected), tolerance=tolerance, detail=detail)
