"""Lines in and text out, over pipes, files and terminals, without a thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from engine.terminal import LineReader, TextWriter, read_all


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue  # the test closed it


async def test_lines_come_whole_however_they_were_written(pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe
    lines = LineReader(read_end)
    os.write(write_end, b"one\r\nzwei ")
    assert await lines.receive() == "one"
    async with trio.open_nursery() as nursery:
        received = []

        async def receive() -> None:
            received.append(await lines.receive())

        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        os.write(write_end, "ü\nlast".encode())
    assert received == ["zwei ü"]
    os.close(write_end)
    assert await lines.receive() == "last"
    assert await lines.receive() is None


async def test_a_cancelled_wait_takes_no_line(pipe: tuple[int, int]) -> None:
    lines = LineReader(pipe[0])
    os.write(pipe[1], b"half")
    with trio.move_on_after(0.01) as scope:
        await lines.receive()
    assert scope.cancelled_caught
    os.write(pipe[1], b" and half\n")
    assert await lines.receive() == "half and half"


@pytest.mark.parametrize("content", ["a\nb\n", ""])
async def test_files_are_read_although_they_cannot_be_waited_for(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lines"
    path.write_text(content)
    with path.open("rb") as file:
        lines = LineReader(file.fileno())
        assert [await lines.receive() for _ in range(3)] == [*content.split(), *[None] * (3 - len(content.split()))]
    with open(os.devnull, "rb") as nothing:  # noqa: ASYNC230
        assert await read_all(nothing.fileno()) == b""


async def test_a_slow_reader_is_waited_for_and_gets_all(pipe: tuple[int, int]) -> None:
    text = "ünïcode" * 40_000
    received = b""
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            await TextWriter(pipe[1]).send(text)
            os.close(pipe[1])

        nursery.start_soon(send)
        await wait_all_tasks_blocked()
        received = await read_all(pipe[0])
    assert received.decode() == text


async def test_a_writer_that_is_waiting_can_be_cancelled(pipe: tuple[int, int]) -> None:
    with trio.move_on_after(0.05) as scope:
        await TextWriter(pipe[1]).send("x" * 1_000_000)
    assert scope.cancelled_caught


async def test_a_reader_that_has_gone_is_an_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with pytest.raises(BrokenPipeError):
        await TextWriter(pipe[1]).send("text")
