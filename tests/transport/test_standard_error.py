"""Nobody waits for a reader of standard error who does not read, and what it lost is told once it reads again."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator

import pytest

from engine.task_tree import write_report, write_stacks
from transport.standard_error import StandardError, standard_error, write_to_stderr


class Pipe:
    """Standard error as a pipe; a write that waited would raise instead."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        for descriptor in (self.reading, self.writing):
            os.set_blocking(descriptor, False)

    def fill(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.write(self.writing, b"-" * 4096):
                pass

    def read_all(self) -> str:
        return os.read(self.reading, 1 << 20).decode()


@contextlib.contextmanager
def open_pipe() -> Iterator[Pipe]:
    """Have a pipe be standard error; within the test, for pytest puts its own there before."""
    pipe = Pipe()
    with open(pipe.writing, "w") as stream, contextlib.redirect_stderr(stream):
        yield pipe
    os.close(pipe.reading)


def test_what_is_not_taken_is_lost_and_counted_and_the_next_that_is_taken_says_so() -> None:
    with open_pipe() as pipe:
        pipe.fill()
        handler = logging.StreamHandler(standard_error)
        for number in range(3):
            handler.emit(logging.LogRecord("a", logging.INFO, "", 0, f"line {number}", (), None))
        assert set(pipe.read_all()) == {"-"}
        write_to_stderr("read again")
        write_to_stderr("and again")
        assert pipe.read_all() == "standard error took nothing 3 times: lines were lost\nread again\nand again\n"


def test_a_line_longer_than_the_pipe_loses_its_end() -> None:
    with open_pipe() as pipe:
        write_to_stderr("x" * (1 << 20))
        assert len(pipe.read_all()) < 1 << 20
        write_to_stderr("next")
        assert pipe.read_all().endswith("lost\nnext\n")


def test_who_asks_what_a_process_does_holds_it_up_no_more_than_a_line() -> None:
    with open_pipe() as pipe:
        write_stacks()
        assert "most recent call first" in pipe.read_all()
        pipe.fill()
        write_stacks()
        pipe.read_all()
        write_to_stderr("on")
        assert "took nothing 1 times" in pipe.read_all()


async def test_a_report_holds_nobody_up_either() -> None:
    with open_pipe() as pipe:
        pipe.fill()
        write_report()
        pipe.read_all()
        write_to_stderr("on")
        assert "took nothing 1 times" in pipe.read_all()


def test_a_stream_in_memory_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = io.StringIO()
    monkeypatch.setattr("sys.stderr", memory)
    StandardError().write("é\n")
    assert memory.getvalue() == "é\n"
