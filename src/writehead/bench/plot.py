"""Results as a picture, PNG and SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from writehead.errors import MissingDependencyError

Row = Mapping[str, Any]

_FOOT_WIDTH = 160
"""Letters of a line at the foot."""

_MANY = 8
"""Names that stand beside each other without being turned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Which columns are drawn: `y` over `x`, a curve (or a bar in each group) for each combination of `by`.

    Several columns of `x` are read together, as one name.
    """

    x: str | tuple[str, ...]
    y: str
    by: tuple[str, ...] = ()
    kind: Literal["line", "bar"] = "bar"
    label: str = ""
    """Of the y axis, with its unit."""
    log: bool = False


def require() -> None:
    """Raise MissingDependencyError unless matplotlib is installed. Imports nothing."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "--plot draws with matplotlib, which is not installed; install it with pip install 'writehead[bench]', "
            "or use --csv"
        )


def files(stem: Path) -> list[Path]:
    """STEM.png and STEM.svg."""
    return [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]


def draw(plot: Plot, rows: Sequence[Row], stem: Path, *, title: str, foot: str) -> None:
    """Write STEM.png and STEM.svg; rows without a number in `y` are left out."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    curves = _curves(plot, rows)
    places = list(dict.fromkeys(x for points in curves.values() for x in points))
    for index, (name, points) in enumerate(curves.items()):
        if plot.kind == "line":
            axes.plot(list(points), list(points.values()), marker="o", label=name)
        else:
            width = 0.8 / len(curves)
            shift = (index - (len(curves) - 1) / 2) * width
            axes.bar([places.index(x) + shift for x in points], list(points.values()), width, label=name)
    if plot.kind == "bar":
        turned = {"rotation": 50, "ha": "right"} if len(places) > _MANY else {}
        axes.set_xticks(range(len(places)), [str(place) for place in places], **turned)  # type: ignore[arg-type]
    if plot.log:
        axes.set_yscale("log")
    axes.set(xlabel=plot.x if isinstance(plot.x, str) else None, ylabel=plot.label or plot.y, title=title)
    axes.grid(visible=True, axis="y", alpha=0.3)
    if plot.by:
        figure.legend(title=", ".join(plot.by), loc="outside right upper")
    lines = [part for line in foot.splitlines() for part in textwrap.wrap(line, _FOOT_WIDTH)]
    figure.supxlabel("\n".join(lines), fontsize=6, color="gray")
    png, svg = files(stem)
    # The same rows make the same file, and text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "writehead", "svg.fonttype": "none"}):
        figure.savefig(png, dpi=150)
        figure.savefig(svg, metadata={"Date": None})


def _curves(plot: Plot, rows: Sequence[Row]) -> dict[str, dict[Any, float]]:
    """name of a curve -> x -> y, in the order of the rows."""
    curves: dict[str, dict[Any, float]] = {}
    for row in rows:
        if isinstance(row.get(plot.y), int | float):
            place = row[plot.x] if isinstance(plot.x, str) else " ".join(str(row[key]) for key in plot.x)
            curves.setdefault(", ".join(str(row[key]) for key in plot.by), {})[place] = row[plot.y]
    return curves
