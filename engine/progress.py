"""Progress bars on standard error while a model is fetched, converted and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from engine.executor.base import Progress

tqdm.monitor_interval = 0  # its monitor would be a thread that nobody owns

_SHOWN_FROM = 2
"""Phases of fewer parts end before a bar could be read."""


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Give a callback `(phase, done, total)` that draws one bar a phase; nothing is drawn off a terminal.

    A bar is there from the first call that has a total, and gone once that is reached or another phase begins, so that
    what is logged then finds an empty line.
    """
    bar: tqdm | None = None
    shown = ""

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal bar, shown
        if bar is not None and (phase != shown or done >= total):
            bar.close()
            bar = None
        if bar is None and done < total and total >= _SHOWN_FROM:
            bar = tqdm(total=total, desc=phase, leave=False, disable=None)
        shown = phase
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield progress
    finally:
        if bar is not None:
            bar.close()
