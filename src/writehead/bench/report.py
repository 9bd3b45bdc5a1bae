"""How every benchmark reports: a table as it goes, CSV as it goes, a plot and one JSON line at its end."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from writehead.bench import machine, plot
from writehead.errors import UsageError

_NUMBER_WIDTH, _TEXT_WIDTH = 11, 17


class Report:
    """The rows of one run. A row is on the terminal and in the CSV file as soon as it is added: a crash loses nothing.

    `columns` says for each column what it means; the documents and the tests read it.
    """

    def __init__(
        self,
        name: str,
        columns: Mapping[str, str],
        *,
        command: str,
        seed: int,
        settings: Mapping[str, Any],
        csv_file: Path | None = None,
        plot_stem: Path | None = None,
    ) -> None:
        if plot_stem is not None:
            plot.require()
            check_writable("--plot", *plot.files(plot_stem))
        self.name, self.columns, self.command, self.seed = name, columns, command, seed
        self.settings, self.machine = dict(settings), machine.describe()
        self.rows: list[dict[str, Any]] = []
        self._plot_stem, self._csv_file = plot_stem, csv_file
        self._widths: dict[str, int] = {}
        if csv_file is not None:
            check_writable("--csv", csv_file)
            self._write_csv("w", list(columns))
        print(machine.sentence(self.machine), file=sys.stderr)

    def add(self, **values: Any) -> dict[str, Any]:
        """Take a row; columns that it does not name are empty. Returns it, rounded to six digits."""
        unknown = values.keys() - self.columns.keys()
        assert not unknown, f"no column {unknown}"
        row = {name: _rounded(values.get(name)) for name in self.columns}
        self.rows.append(row)
        self._print(row)
        if self._csv_file is not None:
            self._write_csv("a", ["" if value is None else value for value in row.values()])
        return row

    def finish(self, picture: plot.Plot, **summary: Any) -> None:
        """Draw the plot if one was asked for, and print the JSON line, the last on stdout."""
        if self._plot_stem is not None:
            foot = f"{machine.sentence(self.machine)}\n{self.command}"
            title = self.command.partition(" -")[0]
            plot.draw(picture, self.rows, self._plot_stem, title=title, foot=foot)
        line = {
            "bench": self.name, "command": self.command, "seed": self.seed, "machine": self.machine,
            "settings": self.settings, **{key: _rounded(value) for key, value in summary.items()}, "rows": self.rows,
        }  # fmt: skip
        print(json.dumps(line), flush=True)

    def _print(self, row: Mapping[str, Any]) -> None:
        """The row as a line of the table; the first one brings the head and decides the widths."""
        texts = {name: _text(value) for name, value in row.items()}
        if not self._widths:
            least = {name: _TEXT_WIDTH if isinstance(value, str) else _NUMBER_WIDTH for name, value in row.items()}
            self._widths = {name: max(len(name), len(text), least[name]) for name, text in texts.items()}
            self._print_line({name: name for name in row})
        self._print_line(texts)

    def _print_line(self, texts: Mapping[str, str]) -> None:
        """Right-aligned, but for reasons, which may be long and come last."""
        cells = (text if name == "reason" else f"{text:>{self._widths[name]}}" for name, text in texts.items())
        print("  ".join(cells).rstrip(), file=sys.stderr, flush=True)

    def _write_csv(self, mode: str, values: list[Any]) -> None:
        assert self._csv_file is not None
        with self._csv_file.open(mode, encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(values)


def check_writable(option: str, *paths: Path) -> None:
    """Raise UsageError if a file cannot be written, before hours are spent on what it is for. It exists after that."""
    for path in paths:
        try:
            path.open("a").close()
        except OSError as error:
            raise UsageError(f"{option}: {path} cannot be written ({error.strerror})") from None


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
