"""Faults planted in the scheduler and the KV cache, each of which the fuzzer must find: who checks the checker.

    python -m fuzz faults --seed 7             how many seconds each takes to be found
    python -m fuzz faults --seed 7 --record    and keep the shrunk histories that find them as tests

A fault replaces a method while it is planted. Where that method no longer exists, or the fault no longer fits it,
planting or finding raises `LookupError`: rewrite the fault, do not drop it.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from engine.core import EngineCore
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix_cache import PrefixCache
from engine.limits import Limits
from engine.outputs import ScheduledRequest
from engine.request import Request, RequestStatus
from engine.scheduler.admission import Admission
from engine.scheduler.scheduler import Scheduler
from fuzz import kv_cache, scheduler
from fuzz.driver import Run, error_of, shrunk
from fuzz.history import EXAMPLES, Drawn, History, Operation, Simulation, Target, replay, write_test

MAX_SECONDS = 60.0
"""How soon each fault must be found."""

Method = Callable[..., Any]
Faulty = Callable[..., Any]
"""The faulty method: called with the true one, and then as that."""


class Fault(NamedTuple):
    """A method, what stands in its place while the fault is planted, and the target that must find it."""

    owner: type
    method: str
    faulty: Faulty
    target: Target = scheduler.TARGET


@contextlib.contextmanager
def replaced(owner: type, method: str, faulty: Faulty) -> Iterator[None]:
    """Put `faulty` in the place of a method while the block lasts.

    Raises:
        LookupError: There is no such method.
    """
    original = vars(owner).get(method)
    if original is None:
        raise LookupError(f"{owner.__name__} has no method {method} to plant a fault in: rewrite the fault")
    setattr(owner, method, lambda *args, **kwargs: faulty(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, method, original)


def planted(name: str) -> contextlib.AbstractContextManager[None]:
    """Plant the fault of this name while the block lasts."""
    fault = FAULTS[name]
    return replaced(fault.owner, fault.method, fault.faulty)


def assert_found(
    name: str, simulate: Callable[..., Simulation], settings: Drawn, operations: Sequence[Operation]
) -> None:
    """Check that a history is clean, and is not once the fault is planted.

    Raises:
        AssertionError: It is not clean, or does not find the fault.
        LookupError: The fault no longer fits the code.
    """
    replay(simulate(settings), operations)
    target = FAULTS[name].target
    with planted(name):
        error = error_of(target, History(settings, operations))
    _check_fits(name, error)
    assert error is not None, f"the fault {name!r} is not found"


# The faults


def _release_drops_too_few(release: Method, pool: BlockPool, blocks: Sequence[Any], *rest: Any) -> None:
    release(pool, blocks[1:], *rest)


def _release_drops_twice(release: Method, pool: BlockPool, blocks: Sequence[Any], *rest: Any) -> None:
    release(pool, [*blocks, *blocks[-1:]], *rest)


def _released_at_once(release: Method, manager: KVCacheManager, request: Request, held_until: int | None) -> None:
    release(manager, request, None)


def _publish_in_advance(manager: KVCacheManager, request: Request, step: int) -> None:
    num_computed, num_slots = request.num_computed_tokens, manager._tables[request.request_id].num_slots
    request.num_computed_tokens = min(request.num_tokens, num_slots)
    manager.publish(request, step)
    request.num_computed_tokens = num_computed


def _published_in_advance(add_row: Method, this: Scheduler, request: Request, *args: Any) -> None:
    add_row(this, request, *args)
    _publish_in_advance(this._kv_cache, request, request.last_step)


def _cached_when_it_leaves(release: Method, manager: KVCacheManager, request: Request, held_until: int | None) -> None:
    if held_until is not None:
        _publish_in_advance(manager, request, held_until)
    release(manager, request, held_until)


def _victim_with_a_row(preempt: Method, this: Scheduler, request: Request, *rest: Any) -> None:
    step = this.in_flight.last_step + 1
    preempt(this, next((other for other in this.running if other.last_step == step), request), *rest)


def _late_input_samples_nothing(
    take_in: Method, this: Scheduler, request: Request, row: ScheduledRequest, token_ids: list[int], failed: Any
) -> Any:
    return take_in(this, request, row, [] if row.num_late else token_ids, failed)


def _preempted_gets_nothing(
    take_in: Method, this: Scheduler, request: Request, row: ScheduledRequest, token_ids: list[int], failed: Any
) -> Any:
    return take_in(this, request, row, token_ids if request.status is RequestStatus.RUNNING else [], failed)


def _preempted_is_told_nothing(take_in: Method, this: Scheduler, request: Request, *args: Any) -> Any:
    _, token_ids, status, cause = take_in(this, request, *args)
    return request, token_ids if request.status is RequestStatus.RUNNING else [], status, cause


def _last_token_hit_too(match: Method, manager: KVCacheManager, request: Request) -> Any:
    request.num_tokens += 1
    found = match(manager, request)
    request.num_tokens -= 1
    return found


def _table_of_an_earlier_life(grow: Method, manager: KVCacheManager, request: Request, num_tokens: int) -> Any:
    tables = grow(manager, request, num_tokens)
    if tables is not None:
        earlier = vars(manager).setdefault("earlier_tables", {})
        tables = copy.copy(earlier.setdefault((request.request_id, tables.num_slots), tables))
    return tables


def _abort_forgets_the_tables(abort: Method, core: EngineCore, *args: Any) -> None:
    with replaced(KVCacheManager, "release", lambda release, *rest: None):
        abort(core, *args)


def _nothing(original: Method, *args: Any) -> None:
    pass


def _reads_nothing(trace: Method, *args: Any) -> Any:
    return set(), trace(*args)[1]


def _no_watermark_beside_who_goes_on(reserves: Method, admission: Admission, victims: list[Request]) -> list[int]:
    found = reserves(admission, victims)
    return [number - found[-1] for number in found]


def _complete_text_goes_on(
    told_grammar: Method, core: EngineCore, request: Request, grammar: Any, token_ids: Any, status: Any, cause: Any
) -> Any:
    told = told_grammar(core, request, grammar, token_ids, status, cause)
    return told if told[0] is not RequestStatus.FINISHED_STOPPED else (status, cause)


def _nine_common_blocks(original: Method, manager: KVCacheManager, running: Sequence[Request]) -> tuple[int, ...]:
    return tuple(9 for _ in original(manager, running))


def _salt_not_hashed(hashes: Method, cache: PrefixCache, request: Request) -> Any:
    salt, request.cache_salt = request.cache_salt, None
    found = hashes(cache, request)
    request.cache_salt = salt
    return found


FAULTS: dict[str, Fault] = {
    "a reference is not dropped": Fault(BlockPool, "release", _release_drops_too_few),
    "a reference is dropped twice": Fault(BlockPool, "release", _release_drops_twice),
    "blocks are freed while a plan names them": Fault(KVCacheManager, "release", _released_at_once),
    "blocks are published before they are full": Fault(Scheduler, "_add_row", _published_in_advance),
    "a partial block is cached when its owner leaves": Fault(KVCacheManager, "release", _cached_when_it_leaves),
    "a victim has a row in the same plan": Fault(Scheduler, "preempt", _victim_with_a_row),
    "a token in flight is dropped": Fault(Scheduler, "_take_in", _late_input_samples_nothing),
    "late tokens of the preempted are dropped": Fault(Scheduler, "_take_in", _preempted_gets_nothing),
    "late tokens of the preempted are not told": Fault(Scheduler, "_take_in", _preempted_is_told_nothing),
    "the last token is hit too": Fault(KVCacheManager, "match", _last_token_hit_too),
    "a stale table is kept": Fault(KVCacheManager, "grow", _table_of_an_earlier_life),
    "an abort forgets the tables": Fault(EngineCore, "abort", _abort_forgets_the_tables),
    "evicted blocks keep their hash": Fault(PrefixCache, "forget", _nothing),
    "what a failed step published stays": Fault(KVCacheManager, "retract", lambda retract, manager: set()),
    "who relies on a failed step goes on": Fault(KVCacheManager, "relies_on", lambda relies_on, *args: False),
    "what a failed row computed stays": Fault(KVCacheManager, "forget", _nothing),
    "who relies on a failed row goes on": Fault(KVCacheManager, "trace", _reads_nothing),
    "a step that has ended stays uncommitted": Fault(PrefixCache, "commit", _nothing),
    "one makes way and blocks are lacking": Fault(Admission, "_reserves", _no_watermark_beside_who_goes_on),
    "one makes way and tokens are lacking": Fault(Admission, "_leaves_tokens", lambda leaves_tokens, *args: True),
    "a complete text goes on": Fault(EngineCore, "_told_grammar", _complete_text_goes_on),
    "nine common blocks are claimed": Fault(KVCacheManager, "num_common_prefix_blocks", _nine_common_blocks),
    "blocks are not published again after a rewind": Fault(KVCacheManager, "rewind", _nothing),
    "the parts of a session that wait are not bounded": Fault(Limits, "part_refusal", _nothing),
    "the salt is not hashed": Fault(PrefixCache, "hashes", _salt_not_hashed, kv_cache.TARGET),
}
"""What is planted, by name."""


# Finding them


def run(minutes: float, seed: int, record: bool = False) -> int:
    """Plant each fault and look for it, for at most `minutes` in all; returns how many were found.

    With `record` the shrunk histories become tests.

    Raises:
        SystemExit: One was not found in time.
    """
    deadline = time.monotonic() + 60 * minutes
    missed = [name for name in FAULTS if not _find(name, seed, min(MAX_SECONDS, deadline - time.monotonic()), record)]
    print(f"faults: {len(FAULTS) - len(missed)} of {len(FAULTS)} found")
    if missed:
        raise SystemExit(1)
    return len(FAULTS)


def _find(name: str, seed: int, max_seconds: float, record: bool) -> bool:
    target = FAULTS[name].target
    this = Run(target, seed)
    with planted(name):
        failure = this.find(max_seconds)
        if failure is None:
            print(f"faults: {name}: NOT FOUND, {this.progress}", flush=True)
            return False
        _check_fits(name, failure.error)
        history = shrunk(target, failure)
        error = error_of(target, history)
    print(
        f"faults: {name}: found after {this.progress.seconds:.2f} s, {this.progress.num_histories} histories; "
        f"{len(history.operations)} operations suffice: {type(error).__name__}: {error}",
        flush=True,
    )
    if record:
        file_name, text = write_test(target, history, f"With {name}: {type(error).__name__}: {error}", fault=name)
        (EXAMPLES / file_name).write_text(text)
    return True


def _check_fits(name: str, error: Exception | None) -> None:
    """Tell a fault that was found from one that is itself broken, for the code around it has changed."""
    if isinstance(error, AttributeError | NameError | TypeError):
        raise LookupError(f"the fault {name!r} no longer fits the code: rewrite it") from error
