"""Whatever is admitted, computed, undone, released and evicted: a request reads only K/V of its own tokens.

The model beside the manager remembers for each slot of which group and tokens its K/V are. Before each computation
every slot that is read, which with a window are those of the last tokens, must hold exactly the request's own
beginning, and all references must add up.

    python -m fuzz kv_cache --minutes 10 --seed 7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from engine.kv_cache.block_tables import BlockTables
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.spec import NULL_BLOCK
from engine.outputs import KVCacheGroup, RequestId
from engine.protocol import EngineCoreRequest
from engine.request import Request
from engine.sampling_params import SamplingParams
from fuzz.coverage import Coverage
from fuzz.history import Drawn, Operation, Target, choose

_Slot = tuple[int, int]


class _Step(NamedTuple):
    """A step in flight: the slots it has `written` are those of the request's tokens from `start` to `end`."""

    number: int
    request: Request
    start: int
    end: int
    written: list[_Slot]


@dataclass(frozen=True, repr=False)
class Settings(Drawn):
    """A pool of a few blocks."""

    num_blocks: int = choose(*range(3, 17))
    block_size: int = choose(1, 2, 3, 4)
    enable_prefix_caching: bool = choose(*[True] * 9, False)
    windows: tuple[int | None, ...] = choose(
        *[(None,)] * 4, (None, 3), (None, 1), (2,), (5,), (3, 6), (None, None), (None, 2, 4)
    )
    max_in_flight: int = choose(16, 1, 3, 6)


@dataclass(frozen=True, repr=False)
class Admit(Operation):
    """Admit a request of `length` tokens that begins like all of the same `prefix`, and compute its first `chunk`."""

    weight: ClassVar[int] = 20
    prefix: int = choose(0, 1, 2)
    length: int = choose(*range(1, 15))
    chunk: int = choose(*range(1, 15))
    salt: int = choose(0, 1)

    def apply(self, simulation: Simulation) -> None:
        """Admit it."""
        simulation.admit(self)


@dataclass(frozen=True, repr=False)
class Compute(Operation):
    """Compute up to `num_tokens` more tokens of the `index`-th running request, appending one if none is left."""

    weight: ClassVar[int] = 50
    index: int = choose(*range(6))
    num_tokens: int = choose(*range(1, 7))

    def event(self, simulation: Simulation) -> str | None:
        """Return that somebody computes, if anybody runs."""
        return "compute" if simulation.running else None

    def apply(self, simulation: Simulation) -> None:
        """Compute them."""
        simulation.compute(simulation.running[self.index % len(simulation.running)], self.num_tokens)


@dataclass(frozen=True, repr=False)
class Release(Operation):
    """Let go of the `index`-th running request."""

    weight: ClassVar[int] = 12
    index: int = choose(*range(6))

    def event(self, simulation: Simulation) -> str | None:
        """Return that somebody is let go, if anybody runs."""
        return "release" if simulation.running else None

    def apply(self, simulation: Simulation) -> None:
        """Release it."""
        simulation.release(simulation.running[self.index % len(simulation.running)])


@dataclass(frozen=True, repr=False)
class Settle(Operation):
    """Commit the oldest step in flight."""

    weight: ClassVar[int] = 40

    def event(self, simulation: Simulation) -> str | None:
        """Return that a step is settled, if one is in flight."""
        return "settle" if simulation.in_flight else None

    def apply(self, simulation: Simulation) -> None:
        """Commit it."""
        simulation.settle()


@dataclass(frozen=True, repr=False)
class Undo(Operation):
    """The oldest step in flight failed, and with it all later ones."""

    weight: ClassVar[int] = 2

    def event(self, simulation: Simulation) -> str | None:
        """Return that steps are undone, if one is in flight."""
        return "undo" if simulation.in_flight else None

    def apply(self, simulation: Simulation) -> None:
        """Undo them."""
        simulation.undo()


@dataclass(frozen=True, repr=False)
class Clear(Operation):
    """Reset the prefix cache, with everybody released."""

    def apply(self, simulation: Simulation) -> None:
        """Reset it."""
        for request in tuple(simulation.running):
            simulation.release(request)
        simulation.manager.reset_prefix_cache()


class Simulation:
    """Applies a history to a manager and compares it with the model after each operation."""

    def __init__(self, settings: Settings, coverage: Coverage | None = None) -> None:
        """Make the manager; what is met is counted in `coverage`."""
        self.coverage = Coverage() if coverage is None else coverage
        self.block_size = settings.block_size
        self.running: list[Request] = []
        self.in_flight: list[_Step] = []
        self.num_steps = 0
        self._max_in_flight = settings.max_in_flight
        self._groups = [KVCacheGroup(layers=(0,), sliding_window=window) for window in settings.windows]
        self._content: dict[_Slot, tuple[Any, ...]] = {}
        self.manager = KVCacheManager(
            settings.num_blocks,
            settings.block_size,
            enable_prefix_caching=settings.enable_prefix_caching,
            hash_salt=b"",
            groups=self._groups,
            max_in_flight=settings.max_in_flight,
        )

    def apply(self, operation: Operation) -> None:
        """Apply one operation; one that cannot be applied now does nothing."""
        event = operation.event(self)
        if event is None:
            return
        self.coverage.saw(event, ("running" if self.running else "idle", f"{min(len(self.in_flight), 3)} in flight"))
        operation.apply(self)
        self.manager.check_invariants(self.running)
        past = self.manager.awaited_steps - {step.number for step in self.in_flight}
        assert not past, f"steps {past} have ended, and what they published or held is still theirs"

    def finish(self) -> None:
        """Settle and release everything.

        Raises:
            AssertionError: Some block is still referenced.
        """
        for operation in [*(Settle() for _ in self.in_flight), *(Release() for _ in self.running)]:
            self.apply(operation)
        assert self.manager.pool.num_used_blocks == 0, "blocks leaked"

    def admit(self, operation: Admit) -> None:
        """Admit a request and compute its first tokens, if it fits."""
        self.num_steps += 1
        name = f"r{self.num_steps}"
        tokens = [operation.prefix * (position // 3) for position in range(operation.length)]
        params = SamplingParams(max_tokens=1000)
        salt = f"salt {operation.salt}" if operation.salt else None
        request = Request(EngineCoreRequest(RequestId(name), name, tokens, params, 0.0, cache_salt=salt), 1, 10**6)
        match = self.manager.match(request)
        assert match.num_tokens < request.num_tokens
        num_tokens = min(match.num_tokens + min(operation.chunk, self._max_in_flight), request.num_tokens)
        num_free = self.manager.pool.num_free_blocks
        if not self.manager.has_room(request, match):
            assert self.manager.pool.num_free_blocks == num_free, "a refusal took blocks"
            return
        self.manager.admit(request, match)
        tables = self.manager.grow(request, num_tokens)
        assert tables is not None, "there was room, and yet the first tokens found none"
        request.num_computed_tokens = request.num_processed_tokens = match.num_tokens
        self.running.append(request)
        self._run_step(request, tables, num_tokens)

    def compute(self, request: Request, num_tokens: int) -> None:
        """Compute more of `request`, if it fits and not too much of it is in flight."""
        if request.num_computed_tokens == request.num_tokens:
            request.append(1)
        most = request.num_processed_tokens + self._max_in_flight
        end = min(request.num_computed_tokens + num_tokens, request.num_tokens, most)
        if end == request.num_computed_tokens:
            return
        tables = self.manager.grow(request, end)
        if tables is not None:
            self._run_step(request, tables, end)

    def _run_step(self, request: Request, tables: BlockTables, end: int) -> None:
        """Check what is read, write what is computed, and leave the step in flight."""
        start, written = request.num_computed_tokens, []
        history = (request.cache_salt, *request.tokens.view().tolist())
        for index, (view, group) in enumerate(zip(tables.views, self._groups, strict=True)):
            table = view.tolist()
            slots = [(table[position // self.block_size], position % self.block_size) for position in range(end)]
            first = 0 if group.sliding_window is None else max(0, start - group.sliding_window + 1)
            for position in range(first, start):
                content = self._content.get(slots[position])
                assert content == (index, history[: position + 2]), f"{request} reads others' K/V at {position}"
            for position in range(start, end):
                assert slots[position][0] != NULL_BLOCK, f"{request} writes into the null block"
                self._content[slots[position]] = (index, history[: position + 2])
            written += slots[start:]
        self.num_steps += 1
        request.num_computed_tokens = end
        request.last_step = self.num_steps
        self.manager.publish(request, self.num_steps)
        self.in_flight.append(_Step(self.num_steps, request, start, end, written))

    def settle(self) -> None:
        """Commit the oldest step in flight."""
        step = self.in_flight.pop(0)
        if step.request in self.running:
            step.request.num_processed_tokens = step.end
        self.manager.settle(step.number)

    def release(self, request: Request) -> None:
        """Let go of `request`."""
        self.running.remove(request)
        is_in_flight = any(step.request is request for step in self.in_flight)
        self.manager.release(request, request.last_step if is_in_flight else None)

    def undo(self) -> None:
        """Undo all steps in flight; whoever relied on one is released."""
        retracted = self.manager.retract()
        for step in reversed(self.in_flight):
            for slot in step.written:
                self._content.pop(slot, None)
            if step.request in self.running:
                step.request.rewind(step.start)
                self.manager.rewind(step.request)
        for request in tuple(self.running):
            if self.manager.relies_on(request, retracted):
                self.release(request)
        while self.in_flight:
            self.manager.settle(self.in_flight.pop(0).number)


TARGET = Target("kv_cache", Settings, (Admit, Compute, Release, Settle, Undo, Clear), Simulation)
