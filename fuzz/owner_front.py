"""A program with `open_engine` (fuzz/owner.py) as the front of a round of fuzz/lifecycle.py."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import trio

from fuzz.fronts import Front, Waiter, pace_of, running

INTERRUPTED = {"KeyboardInterrupt", "BaseExceptionGroup"}
"""What a traceback may be of: Python's own answer to SIGINT, as it is and as Trio passes it on."""


class OwnerFront(Front):
    """A program with `open_engine` that tells what became of every waiter."""

    async def reach(self, phase: str, after_s: float) -> None:
        """See `Front`."""
        if phase == "start":
            await trio.sleep(after_s * 0.8)
            return
        await self.wait_for(lambda: self._said("phase"))
        if phase == "load":
            await trio.sleep(after_s * (0.03 if self.pace.step_ms else 2.0))
            return
        await self.wait_for(lambda: self._said("ready"))
        if phase == "prefill":
            await trio.sleep(after_s * 0.1)
            return
        await self.wait_for(self._is_under_way)
        await trio.sleep(after_s * 0.2)
        if phase != "decode":
            self.is_ending = True
            assert self.process.stdin is not None
            await self.process.stdin.aclose()
            await trio.sleep(after_s * 0.1)

    def _said(self, word: str) -> list[list[str]]:
        return [line.split(maxsplit=3) for line in self.lines if line.startswith(f"{word} ")]

    def _is_under_way(self) -> bool:
        """Whether all streams have begun; those that a pause has overtaken wait."""
        is_pausing = any(words[2] == "pause" for words in self._said("waits"))
        return is_pausing or len(self._said("begun")) >= len(self._streams_said())

    def _streams_said(self) -> list[str]:
        return [words[2] for words in self._said("waits") if words[2].startswith("stream")]

    def codes_of_stop(self, numbers: Sequence[int], *, is_handled: bool) -> frozenset[int]:
        """See `Front`."""
        return self.TERM_DEFAULT if signal.SIGTERM in numbers else self.INT_DEFAULT

    def codes_of_death(self) -> frozenset[int]:
        """See `Front`."""
        return frozenset({0})

    def waiters(self) -> list[Waiter]:
        """See `Front`."""
        answers = {words[2]: (words[3], float(words[1])) for words in self._said("answered")}
        return [Waiter(words[2], *answers.get(words[2], (None, 0.0))) for words in self._said("waits")]

    def check_answers(self) -> None:
        """See `Front`."""
        if self.code == 0:
            (left,) = self._said("left")
            assert left[2] == "0", f"{left[2]} descriptors are left open"
        raised = set(_raised(self.lines)) - INTERRUPTED
        assert not raised, f"tracebacks of {sorted(raised)}"

    async def check_goes_on(self) -> None:
        """See `Front`."""
        await self.wait_for(lambda: self._said("ready"))
        assert self._said("ready"), "the engine did not come up"
        with trio.move_on_after(self.pace.news_s):
            await self.wait_for(self._is_under_way)
        assert self._is_under_way(), "a stream has not begun"
        assert not self._said("died")


def _raised(lines: list[str]) -> list[str]:
    """Return the types of the exceptions whose tracebacks are in `lines`: those within a group, not what they hit."""
    found = []
    is_within = False
    for line in lines:
        text = re.sub(r"^(\[engine-\d+\] )?(\s*[|+] )?", "", line)
        if "Traceback (most recent call last)" in text:
            is_within = True
        elif is_within and text and not text.startswith(" "):
            found.append(text.partition(":")[0])
            is_within = False
        elif text.startswith("During handling of the above exception"):
            found.pop()
    return found


def open_owner(
    model: str, folder: Path, num_engines: int, num_streams: int, *, drains: bool
) -> AbstractAsyncContextManager[Front]:
    """Run a program that owns engines for `model`; it never drains."""
    pace = pace_of(model)
    argv = ["fuzz.owner", model, str(pace.step_ms), str(num_engines), str(num_streams), "0.05"]
    return running(argv, folder, lambda process, nursery: OwnerFront(process, pace))
