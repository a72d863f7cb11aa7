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
    """Give a callback `(phase, done, total)` that draws one bar a phase; nothing is drawn off a terminal."""
    bar: tqdm | None = None
    shown = ""

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal bar, shown
        if phase != shown:
            shown = phase
            if bar is not None:
                bar.close()
            bar = tqdm(total=total, desc=phase, leave=False, disable=None) if total >= _SHOWN_FROM else None
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield progress
    finally:
        if bar is not None:
            bar.close()
