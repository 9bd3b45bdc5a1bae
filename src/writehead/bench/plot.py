"""Results as a picture, PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from writehead.errors import MissingDependencyError, UsageError

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Which columns are drawn: `y` over `x`, a curve (or a bar in each group) for each combination of `by`."""

    x: str
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


def draw(plot: Plot, rows: Sequence[Row], stem: Path, *, title: str, foot: str) -> list[Path]:
    """Write STEM.png and STEM.svg; rows without a number in `y` are left out. Raises UsageError for a bad path."""
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
        axes.set_xticks(range(len(places)), [str(place) for place in places])
    if plot.log:
        axes.set_yscale("log")
    axes.set(xlabel=plot.x, ylabel=plot.label or plot.y, title=title)
    axes.grid(visible=True, axis="y", alpha=0.3)
    if plot.by:
        axes.legend(title=", ".join(plot.by))
    figure.supxlabel(foot, fontsize=6, color="gray")
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    try:
        with matplotlib.rc_context({"svg.hashsalt": "writehead"}):  # the same rows, the same file
            figure.savefig(files[0], dpi=150)
            figure.savefig(files[1], metadata={"Date": None})
    except OSError as error:
        raise UsageError(f"--plot: {stem} cannot be written ({error.strerror or error})") from None
    return files


def _curves(plot: Plot, rows: Sequence[Row]) -> dict[str, dict[Any, float]]:
    """name of a curve -> x -> y, in the order of the rows."""
    curves: dict[str, dict[Any, float]] = {}
    for row in rows:
        if isinstance(row.get(plot.y), int | float):
            curves.setdefault(", ".join(str(row[key]) for key in plot.by), {})[row[plot.x]] = row[plot.y]
    return curves
