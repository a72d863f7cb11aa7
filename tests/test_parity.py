"""tests/PARITY.md has every row of the reference, and every test it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_MISSING = {11, 30, 36, 43, 46, 51, 55, 58, 66, 73, 84}
ROWS = {
    "T": set(range(1, 88)) - _MISSING
    | {88, 89, 90, 91, 92, 93, 94, 96, 97, 98, 99, 100, 101, 102, 103, 105, 106, 108, 110},
    "S": set(range(1, 17)) - {15} | {25, 26, 27, 28, 29, 31},
    "A": set(range(1, 52)) - {2, 8, 14, 17, 21, 29, 31, 32},
    "B": set(range(3, 78)) - {8, 21, 23, 26, 44, 47, 55, 61, 67, 70},
    "C": set(range(1, 55)) - {12, 20, 26, 27, 28, 36, 45, 46, 53},
    "E": set(range(1, 40)) - {5, 7, 8, 9, 12, 38},
    "F": set(range(1, 20)) - {7, 8, 12},
}
"""Numbers of the reference: of its behaviour, of event sequences, and of the kinds of reports."""


def table() -> list[tuple[str, int, str]]:
    """Return kind, number and last cell of each row."""
    text = (ROOT / "tests" / "PARITY.md").read_text()
    rows = re.findall(r"^\| ([A-Z])-(\d+) \| [^|]+ \| ([^|]+) \|$", text, flags=re.MULTILINE)
    assert len(rows) == sum(line.startswith("| ") for line in text.splitlines()) - 2, "a line of a table is malformed"
    return [(kind, int(number), cell) for kind, number, cell in rows]


@cache
def names_in(path: str) -> set[str]:
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("kind", ROWS)
def test_every_row_of_the_reference_is_in_the_table_once(kind: str) -> None:
    numbers = [number for row_kind, number, _ in table() if row_kind == kind]
    assert numbers == sorted(ROWS[kind])


def test_every_row_names_tests_that_exist_or_says_why_it_has_none() -> None:
    for kind, number, cell in table():
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)
        assert named or cell.startswith("does not apply: "), f"{kind}-{number} names no test and gives no reason"
        assert cell.count("`") == 2 * len(named), f"{kind}-{number}: not the name of a test: {cell}"
        for path, name in named:
            assert name in names_in(path), f"{kind}-{number}: {path} has no {name}"
