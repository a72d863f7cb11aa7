"""What a measurement found, printed for people and written as JSON for programs: the same figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from engine.errors import ConfigError

PERCENTILES = (50, 90, 99)


@dataclass
class Table:
    """Rows of numbers under common columns; a column's name ends in its unit."""

    columns: Sequence[str]
    rows: dict[str, Sequence[float]] = field(default_factory=dict)


class Report:
    """Figures by name, in the order they were added, after the settings they hold for."""

    def __init__(self, bench: str, settings: Mapping[str, Any]) -> None:
        """Report on `bench`, run with `settings`."""
        self._bench = bench
        self._settings = dict(settings)
        self._figures: dict[str, tuple[float, str]] = {}
        self._tables: dict[str, Table] = {}
        self._files: dict[str, tuple[str, str]] = {}

    def add(self, name: str, value: float, unit: str = "") -> None:
        """Add one figure."""
        self._figures[name] = (value, unit)

    def add_verdict(self, name: str, holds: bool) -> None:
        """Add whether what was found is within a bound."""
        self._figures[name] = (holds, "")

    def add_times(self, name: str, times_s: Sequence[float]) -> None:
        """Add how times, in seconds, are distributed; shown in milliseconds. None are shown as nothing."""
        columns = ["mean_ms", *(f"p{percentile}_ms" for percentile in PERCENTILES), "max_ms"]
        if times_s:
            times_ms = np.array(times_s) * 1000
            row = [times_ms.mean(), *np.percentile(times_ms, PERCENTILES), times_ms.max()]
            self._tables.setdefault("times", Table(columns)).rows[name] = [float(value) for value in row]

    def add_table(self, name: str, table: Table) -> None:
        """Add a table of its own."""
        self._tables[name] = table

    def add_file(self, name: str, path: str, reader: str) -> None:
        """Add where more was written, and what shows it to people."""
        self._files[name] = (path, reader)

    def render(self) -> str:
        """Return the tables for people."""
        settings = ", ".join(f"{_words(name)} {value}" for name, value in self._settings.items())
        lines = [f"bench {self._bench}: {settings}", ""]
        width = max(map(len, self._figures), default=0)
        lines += [f"  {_words(n):{width}}  {_number(v)} {unit}".rstrip() for n, (v, unit) in self._figures.items()]
        for table in self._tables.values():
            width = max(map(len, table.rows), default=0)
            lines += ["", f"  {'':{width}}" + "".join(f"{_words(column):>12}" for column in table.columns)]
            for name, row in table.rows.items():
                lines.append(f"  {_words(name):{width}}" + "".join(f"{_number(value):>12}" for value in row))
        lines += [
            line
            for name, (path, reader) in self._files.items()
            for line in ("", f"  {_words(name)}: {path}, for {reader}")
        ]
        return "\n".join(lines) + "\n"

    def as_text(self) -> str:
        """Return the figures for programs as a JSON text."""
        return json.dumps(self.as_json(), indent=2) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Return the figures for programs: units are parts of the names."""
        figures = {_key(name, unit): value for name, (value, unit) in self._figures.items()}
        tables = {
            title: {name: dict(zip(table.columns, row, strict=True)) for name, row in table.rows.items()}
            for title, table in self._tables.items()
        }
        files = {"files": {name: path for name, (path, _) in self._files.items()}} if self._files else {}
        return {"bench": self._bench, "settings": self._settings, "figures": figures} | tables | files


@contextmanager
def open_output(flag: str, path: Path | None) -> Iterator[Callable[[str], None]]:
    """Open what `flag` names, before anything is measured, and give what writes a text to it; nothing where it is None.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path is None:
        yield lambda text: None
        return
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from error
    with file:
        yield lambda text: _write(file, text)


def _write(file: TextIO, text: str) -> None:
    file.truncate(0)  # an earlier one stays until there is another
    file.write(text)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _key(name: str, unit: str) -> str:
    return f"{name}_{unit.replace('/', '_per_').replace('%', 'percent').replace(' ', '_')}" if unit else name


def _number(value: float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value}" if isinstance(value, int) else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
