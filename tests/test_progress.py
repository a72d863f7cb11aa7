"""Progress bars: when they come, and that they are gone before anything else is written."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from engine.executor.base import Progress
from engine.progress import show_progress


class Terminal(io.StringIO):
    """Keeps what is written, and says that it is a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def line(self) -> str:
        """What stands on the line that is being written, the cursor's returns applied."""
        shown = ""
        for part in self.getvalue().rsplit("\n", 1)[-1].split("\r"):
            shown = part + shown[len(part) :]
        return shown.strip()


@contextmanager
def shown_on_terminal() -> Iterator[tuple[Terminal, Progress]]:
    with redirect_stderr(Terminal()) as terminal, show_progress() as progress:
        yield terminal, progress


def test_a_phase_gets_its_bar_with_the_first_total_that_can_be_used() -> None:
    with shown_on_terminal() as (terminal, progress):
        progress("weights", 0, 0)
        assert terminal.getvalue() == ""
        progress("weights", 0, 30)
        assert terminal.line.startswith("weights:   0%")
        progress("kv_specs", 0, 1)


def test_a_bar_that_reached_its_total_is_gone_and_does_not_come_again() -> None:
    with shown_on_terminal() as (terminal, progress):
        for done in range(31):
            progress("convert", done, 30)
        assert terminal.line == ""
        written = terminal.getvalue()
        progress("convert", 30, 30)
    assert terminal.getvalue() == written
    assert written.count("convert:   0%") == 1


@pytest.mark.parametrize("call", [("weights", 0, 0), ("weights", 1, 1), ("warm_up", 0, 1)])
def test_a_bar_is_gone_when_another_phase_begins(call: tuple[str, int, int]) -> None:
    with shown_on_terminal() as (terminal, progress):
        progress("convert", 3, 30)
        assert "convert:" in terminal.line
        progress(*call)
        assert terminal.line == ""


def fail() -> None:
    with show_progress() as progress:
        progress("convert", 3, 30)
        raise ValueError("broken")


def test_a_bar_is_gone_when_what_it_counted_failed() -> None:
    with redirect_stderr(Terminal()) as terminal, pytest.raises(ValueError, match="broken"):
        fail()
    assert terminal.line == ""


def test_nothing_is_drawn_off_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress() as progress:
        progress("convert", 3, 30)
    assert capfd.readouterr() == ("", "")
