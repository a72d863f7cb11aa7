"""Numbers that only grow at the end: token ids and block tables, which plans in flight refer to without a copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from engine.outputs import TokenArray

_LEAST_CAPACITY = 32
_ZERO = array("i", [0])


class AppendOnlyArray:
    """Int32 numbers that only grow at the end, so that a view handed out stays valid and never changes.

    Growing past the capacity moves to a buffer of twice the size; older views keep the older buffer. The buffer is an
    `array`, which takes a number in half the time that NumPy does; views are NumPy's.
    """

    __slots__ = ("_buffer", "_capacity", "_length", "_read_only")

    def __init__(self, values: Sequence[int] = ()) -> None:
        """Copy `values`."""
        numbers = array("i", values)
        self._length = len(numbers)
        self._allocate(numbers)

    def __len__(self) -> int:
        return self._length

    def append(self, value: int) -> None:
        """Add one number."""
        if self._length == self._capacity:
            self._allocate(self._buffer)
        self._buffer[self._length] = value
        self._length += 1

    def drop_last(self) -> None:
        """Take back the last number, which no view handed out may hold."""
        self._length -= 1

    def view(self) -> TokenArray:
        """Return all numbers so far, read-only, `[len(self)]`, without a copy."""
        return self._read_only[: self._length]

    def _allocate(self, numbers: array[int]) -> None:
        self._capacity = max(_LEAST_CAPACITY, 2 * len(numbers))
        self._buffer = numbers + _ZERO * (self._capacity - len(numbers))
        self._read_only: TokenArray = np.frombuffer(memoryview(self._buffer).toreadonly(), dtype=np.int32)
