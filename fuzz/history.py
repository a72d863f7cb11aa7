"""A history is a list of plain operations on an engine of plain settings: drawn, replayed, written down as a test.

What an operation or a setting may be is said once, at its field: `choose` lists the values, the plainest first. The
seeded driver, Hypothesis and the shrinker all read them there, and `repr` is the code that makes the same history
again. So a new operation is one small class, and a new setting one line.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

EXAMPLES = Path("tests/fuzz/examples")
"""Where failures found are kept, as tests, when run from the project's folder."""
LINE_LENGTH = 120


def choose(*values: Any) -> Any:
    """A field of a `Drawn`: one of `values`, the plainest first; one listed twice is drawn twice as often."""
    return field(default=values[0], metadata={"values": values})


AnyDrawn = TypeVar("AnyDrawn", bound="Drawn")


class Drawn:
    """Plain data whose fields are drawn from the values that `choose` lists. A frozen dataclass with `repr=False`."""

    @classmethod
    @functools.cache
    def choices(cls) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """Return each field's name and values, in order of declaration."""
        return tuple((one.name, one.metadata["values"]) for one in fields(cls))

    @classmethod
    def draw(cls, draw: random.Random) -> Self:
        """Draw one."""
        return cls.drawer(draw)()

    @classmethod
    def drawer(cls, draw: random.Random) -> Callable[[], Self]:
        """Return what draws one at each call."""
        number = draw.random
        counted = [(values, len(values)) for _, values in cls.choices()]
        return lambda: _made(cls, *[values[int(number() * count)] for values, count in counted])

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their plainest value."""
        return {name: value for name, values in self.choices() if (value := getattr(self, name)) != values[0]}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(_arguments(self))})"


@functools.lru_cache(maxsize=4096)
def _made(kind: type[AnyDrawn], *values: Any) -> AnyDrawn:
    """Make one of these values; equal ones are one object, which nobody can change."""
    return kind(*values)


class Operation(Drawn):
    """One act of a history. `weight` says how often it is drawn, `apply` what it does to a simulation."""

    weight: ClassVar[int] = 1

    def event(self, simulation: Any) -> str | None:
        """Return what will happen, for the coverage; None where the operation cannot be applied now, and is not."""
        return type(self).__name__.lower()

    def whom(self, simulation: Any) -> str | None:
        """Return the one request that it is about, whose status alone the coverage tells; None for everyone."""
        return None

    def apply(self, simulation: Any) -> None:
        """Do it; only called where `event` says what will happen."""
        raise NotImplementedError


class History(NamedTuple):
    """Settings and operations: all that a run depends on."""

    settings: Drawn
    operations: Sequence[Operation]


class Simulation(Protocol):
    """Applies a history to the real code, and checks its promises."""

    num_steps: int

    def apply(self, operation: Operation) -> None:
        """Apply one operation, and check what must hold after each."""
        ...

    def finish(self) -> None:
        """Run what is left to its end, and check what must hold then."""
        ...


class Target(NamedTuple):
    """What is fuzzed.

    Attributes:
        name: Of the target, and of the module in `fuzz` that its classes are in.
        settings: Their class.
        operations: The classes of all operations.
        simulate: Starts a simulation with some settings.
    """

    name: str
    settings: type[Drawn]
    operations: tuple[type[Operation], ...]
    simulate: Callable[..., Simulation]

    def draw(self, draw: random.Random, fixed: dict[str, Any]) -> History:
        """Draw a history; `fixed` settings are not drawn."""
        settings = self.settings(**{**self.settings.draw(draw).given(), **fixed})
        weights = [kind.weight for kind in self.operations]
        kinds = draw.choices(self.operations, weights, k=draw.choice((40, 160, 480)))
        drawn = {kind: kind.drawer(draw) for kind in self.operations}
        return History(settings, [drawn[kind]() for kind in kinds])


def replay(simulation: Simulation, operations: Sequence[Operation]) -> None:
    """Apply a whole history.

    Raises:
        AssertionError: It breaks a promise.
    """
    for operation in operations:
        simulation.apply(operation)
    simulation.finish()


# Histories as tests


def write_test(target: Target, history: History, reason: str, fault: str | None = None) -> tuple[str, str]:
    """Write a history as a test: that it stays clean or, with `fault`, that it finds this planted fault.

    Returns:
        The test's file name and its text, formatted like all code here.
    """
    simulation = target.simulate.__name__
    used = {type(one).__name__ for one in (history.settings, *history.operations)} | {simulation}
    lines = "".join(f"        {_code(one, 8)},\n" for one in history.operations)
    operations = f"[\n{lines}    ]" if lines else "[]"
    digest = hashlib.sha256(f"{history.settings}{operations}".encode()).hexdigest()[:8]
    if fault is None:
        name, source = f"{target.name}_history_{digest}_stays_clean", "fuzz.history"
        call, function = f"replay({simulation}(settings), operations)", "replay"
    else:
        name, source = f"the_fault_{'_'.join(fault.split())}_is_found", "fuzz.faults"
        call, function = f"assert_found({json.dumps(fault)}, {simulation}, settings, operations)", "assert_found"
    return f"test_{name}.py", (
        f'"""{_one_line(reason)}"""\n\nfrom __future__ import annotations\n\n'
        f"from {source} import {function}\n{_import(f'fuzz.{target.name}', sorted(used))}\n\n\n"
        f"def test_{name}() -> None:\n"
        f"    settings = {_code(history.settings, 4)}\n    operations = {operations}\n    {call}\n"
    )


def _code(drawn: Drawn, indent: int) -> str:
    """Return the code that makes `drawn`, one field a line where it would be too long for one line."""
    line = repr(drawn)
    if indent + len("settings = ") + len(line) <= LINE_LENGTH:
        return line
    space = " " * indent
    return f"{type(drawn).__name__}(\n{''.join(f'{space}    {one},' + chr(10) for one in _arguments(drawn))}{space})"


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"from {module} import (\n{''.join(f'    {name},' + chr(10) for name in names)})"


def _one_line(text: str) -> str:
    short = text.splitlines()[0].replace("\\", "/").replace('"', "'")[: LINE_LENGTH - 7].rstrip() if text else "Kept"
    return short if short.endswith(".") else f"{short}."


def _arguments(drawn: Drawn) -> list[str]:
    return [f"{name}={_literal(value)}" for name, value in drawn.given().items()]


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
