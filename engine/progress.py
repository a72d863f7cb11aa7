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
    what is logged then finds an empty line. Engines that start side by side, whose phases read "engine 1: weights",
    have a bar each.
    """
    bars: dict[str, tuple[str, tqdm]] = {}

    def progress(phase: str, done: int, total: int) -> None:
        source = phase.rpartition(": ")[0]
        shown, bar = bars.get(source, ("", None))
        if bar is not None and (phase != shown or done >= total):
            bar.close()
            del bars[source]
            bar = None
        if bar is None and done < total and total >= _SHOWN_FROM:
            bar = tqdm(total=total, desc=phase, leave=False, disable=None)
            bars[source] = phase, bar
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield progress
    finally:
        for _, bar in bars.values():
            bar.close()
