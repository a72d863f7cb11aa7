"""What a child wrote is passed on line by line, in time in proportion, and its room is given back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from transport.child_output import ChildOutput
from transport.lines import MAX_LINE_BYTES


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def output(lines: list[str]) -> Iterator[ChildOutput]:
    opened = ChildOutput(lines.append)
    yield opened
    opened.close()


def test_what_was_passed_on_is_given_back_to_the_system(output: ChildOutput, lines: list[str]) -> None:
    os.write(output.fileno(), (b"x" * 1023 + b"\n") * 1024)
    assert os.fstat(output.fileno()).st_blocks * 512 >= 1 << 20
    output.pass_on()
    assert len(lines) == 1024
    assert os.fstat(output.fileno()).st_blocks * 512 <= 1 << 14, "its blocks are free; the size stays"


def test_a_line_is_passed_on_when_it_ends_or_with_the_childs_end(output: ChildOutput, lines: list[str]) -> None:
    os.write(output.fileno(), b"one\r\ntw")
    output.pass_on()
    assert lines == ["one"]
    os.write(output.fileno(), b"o\nthree")
    output.pass_on(is_last=True)
    assert lines == list(output.tail) == ["one", "two", "three"]


def test_a_line_without_an_end_is_cut_and_costs_time_in_proportion(output: ChildOutput, lines: list[str]) -> None:
    took_s = []
    for num_mib in (2, 16):
        os.write(output.fileno(), b"x" * (num_mib << 20))
        began_s = time.process_time()
        output.pass_on()
        took_s.append(time.process_time() - began_s)
        assert max(map(len, lines)) <= 2 * MAX_LINE_BYTES
        assert sum(map(len, lines)) == num_mib << 20
        lines.clear()
    assert took_s[1] < 32 * took_s[0], "8 times as much took over 32 times as long"
