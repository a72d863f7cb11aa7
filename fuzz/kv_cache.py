"""Whatever is admitted, computed, undone, released and evicted: a request reads only K/V of its own tokens.

The model beside the manager remembers for each slot which tokens its K/V stand for. Before each computation every
slot that counts as computed must hold exactly the request's own beginning, and all references must add up.

    python -m fuzz kv_cache --minutes 10 --seed 7
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.kv_cache.manager import KVCacheManager
from engine.outputs import RequestId
from engine.protocol import EngineCoreRequest
from engine.request import Request
from engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Admit:
    """Admit a request of `length` tokens that begins like all of the same `prefix`, and compute its first `chunk`."""

    prefix: int = 0
    length: int = 1
    chunk: int = 1
    salt: int = 0


@dataclass(frozen=True)
class Compute:
    """Compute up to `num_tokens` more tokens of the `index`-th running request, appending one if none is left."""

    index: int = 0
    num_tokens: int = 1


@dataclass(frozen=True)
class Release:
    """Let go of the `index`-th running request."""

    index: int = 0


@dataclass(frozen=True)
class Settle:
    """Commit the oldest step in flight."""


@dataclass(frozen=True)
class Undo:
    """The oldest step in flight failed, and with it all later ones."""


@dataclass(frozen=True)
class Clear:
    """Reset the prefix cache, with everybody released."""


Operation = Admit | Compute | Release | Settle | Undo | Clear
_Slot = tuple[int, int]


@dataclass
class Simulation:
    """Applies a history to a manager and compares it with the model after each operation."""

    num_blocks: int = 8
    block_size: int = 2
    enable_prefix_caching: bool = True
    running: list[Request] = field(default_factory=list)
    content: dict[_Slot, tuple[Any, ...]] = field(default_factory=dict)
    in_flight: list[tuple[int, Request, int, list[_Slot]]] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        """Make the manager."""
        self.manager = KVCacheManager(
            self.num_blocks, self.block_size, enable_prefix_caching=self.enable_prefix_caching, hash_salt=b""
        )

    def apply(self, operation: Operation) -> None:
        """Apply one operation; one that cannot be applied now does nothing."""
        match operation:
            case Admit():
                self._admit(operation)
            case Compute(index, num_tokens) if self.running:
                self._compute(self.running[index % len(self.running)], num_tokens)
            case Release(index) if self.running:
                self._release(self.running[index % len(self.running)])
            case Settle() if self.in_flight:
                self.manager.settle(self.in_flight.pop(0)[0])
            case Undo() if self.in_flight:
                self._undo()
            case Clear():
                for request in tuple(self.running):
                    self._release(request)
                self.manager.reset_prefix_cache()
        self.manager.check_invariants(self.running)

    def finish(self) -> None:
        """Settle and release everything.

        Raises:
            AssertionError: Some block is still referenced.
        """
        for operation in [*(Settle() for _ in self.in_flight), *(Release() for _ in self.running)]:
            self.apply(operation)
        assert self.manager.pool.num_used_blocks == 0

    def _admit(self, operation: Admit) -> None:
        self.num_steps += 1
        name = f"r{self.num_steps}"
        tokens = [operation.prefix * (position // 3) for position in range(operation.length)]
        params = SamplingParams(max_tokens=1000)
        salt = f"salt {operation.salt}" if operation.salt else None
        request = Request(EngineCoreRequest(RequestId(name), name, tokens, params, 0.0, cache_salt=salt), 1, 10**6)
        match = self.manager.match(request)
        assert match.num_tokens < request.num_tokens
        num_tokens = min(match.num_tokens + operation.chunk, request.num_tokens)
        num_free = self.manager.pool.num_free_blocks
        if not self.manager.has_room(request, match):
            assert self.manager.pool.num_free_blocks == num_free, "a refusal took blocks"
            return
        self.manager.admit(request, match)
        assert self.manager.grow(request, num_tokens), "there was room, and yet the first tokens found none"
        request.num_computed_tokens = match.num_tokens
        self.running.append(request)
        self._run_step(request, num_tokens)

    def _compute(self, request: Request, num_tokens: int) -> None:
        if request.num_computed_tokens == request.num_tokens:
            request.append(1)
        end = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        if self.manager.grow(request, end):
            self._run_step(request, end)

    def _run_step(self, request: Request, end: int) -> None:
        """Check what is read, write what is computed, and leave the step in flight."""
        table = self.manager.block_tables(request)[0].tolist()
        history = (request.cache_salt, *request.tokens.view().tolist())
        slots = [(table[position // self.block_size], position % self.block_size) for position in range(end)]
        start = request.num_computed_tokens
        for position, slot in enumerate(slots[:start]):
            assert self.content.get(slot) == history[: position + 2], f"{request} reads others' K/V at {position}"
        for position in range(start, end):
            self.content[slots[position]] = history[: position + 2]
        self.num_steps += 1
        request.num_computed_tokens = end
        request.last_step = self.num_steps
        self.manager.publish(request, self.num_steps)
        self.in_flight.append((self.num_steps, request, start, slots[start:]))

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        is_in_flight = any(request is other for _, other, _, _ in self.in_flight)
        self.manager.release(request, request.last_step if is_in_flight else None)

    def _undo(self) -> None:
        retracted = self.manager.retract()
        for _, request, start, slots in reversed(self.in_flight):
            for slot in slots:
                self.content.pop(slot, None)
            if request in self.running:
                request.rewind(start)
                self.manager.rewind(request)
        for request in tuple(self.running):
            if self.manager.relies_on(request, retracted):
                self._release(request)
        while self.in_flight:
            self.manager.settle(self.in_flight.pop(0)[0])


def draw_history(random: random.Random, num_operations: int) -> Iterator[Operation]:
    """Draw operations for a pool of a few blocks."""
    for kind in random.choices("ACRSUX", weights=[20, 50, 12, 40, 2, 1], k=num_operations):
        match kind:
            case "A":
                yield Admit(random.randint(0, 2), random.randint(1, 14), random.randint(1, 14), random.randint(0, 1))
            case "C":
                yield Compute(random.randint(0, 5), random.randint(1, 6))
            case "R":
                yield Release(random.randint(0, 5))
            case "S":
                yield Settle()
            case "U":
                yield Undo()
            case _:
                yield Clear()


def run(minutes: float, seed: int) -> int:
    """Run drawn histories until the time is over; returns how many steps were made.

    Raises:
        AssertionError: A history broke a promise; its pool and operations are printed first.
    """
    deadline = time.monotonic() + 60 * minutes
    num_steps = num_histories = 0
    while time.monotonic() < deadline:
        drawn = random.Random(f"{seed}.{num_histories}")
        pool = (drawn.randint(3, 16), drawn.randint(1, 4), drawn.random() < 0.9)
        history = list(draw_history(drawn, drawn.choice([10, 40, 160])))
        simulation = Simulation(*pool)
        try:
            for operation in history:
                simulation.apply(operation)
            simulation.finish()
        except BaseException:
            print(f"seed {seed}, history {num_histories}: {pool}\n{history}")
            raise
        num_steps += simulation.num_steps
        num_histories += 1
    print(f"kv_cache: {num_histories} histories, {num_steps} steps, clean")
    return num_steps
