"""What can be asked of a running engine beside requests: one struct a verb, a closed union, decoded by type.

There is no call by attribute name: what is not in `Verb` does not exist, and an argument has the type of its field.
A verb's class says how long its caller waits by default and what it answers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, get_args

import msgspec
from msgspec import Meta

from engine.errors import Cause, UtilityError
from engine.metrics import SchedulerStats

QUICK_TIMEOUT_S = 30.0
"""What is done between two steps: a step may take a while."""
LONG_TIMEOUT_S = 600.0
"""What waits for running requests, or moves weights."""


STOPPING = Cause("EngineStopping", "the engine is stopping and takes no calls")
"""What calls are answered from a drain or stop on."""


class PauseMode(enum.StrEnum):
    """What pausing does with running requests: end them, let them finish, or freeze them."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class SleepTag(enum.StrEnum):
    """What can sleep: keys and values, weights, and the scheduler alone."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    SCHEDULING = "scheduling"


def _in_a_row(answers: Sequence[list[Any]]) -> list[Any]:
    return [answer for of_engine in answers for answer in of_engine]


def _under_names(answers: Sequence[str]) -> str:
    return "\n".join(f"engine {rank}: {text}" for rank, text in enumerate(answers))


class _Verb(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True, tag=True):
    """Base of all verbs.

    Attributes:
        timeout_s: How long a caller waits for the answer unless it says otherwise.
        result: The type of the answer.
        join: Makes one answer of those of several engines, by rank; unless said otherwise there is none.
    """

    timeout_s: ClassVar[float] = QUICK_TIMEOUT_S
    result: ClassVar[Any] = None
    join: ClassVar[Callable[[Sequence[Any]], Any]] = staticmethod(lambda answers: None)


class ResetPrefixCache(_Verb, frozen=True):
    """Forget all cached prefixes; with `reset_running` also preempt whoever runs. Result: whether it was done."""

    result: ClassVar[Any] = bool
    join: ClassVar[Callable[[Sequence[Any]], Any]] = all
    reset_running: bool = False


class Pause(_Verb, frozen=True):
    """Stop admitting (abort, wait) or stepping (keep) until `Resume`; answered once nothing runs.

    With `clear_cache` the prefix cache is forgotten then; frozen requests compute anew and go on where they were.
    """

    timeout_s: ClassVar[float] = LONG_TIMEOUT_S
    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = True


class Resume(_Verb, frozen=True):
    """Undo `Pause`; refused while something sleeps."""


class IsPaused(_Verb, frozen=True):
    """Result: whether a pause was asked for and not undone, of several engines by any."""

    result: ClassVar[Any] = bool
    join: ClassVar[Callable[[Sequence[Any]], Any]] = any


class Sleep(_Verb, frozen=True):
    """Pause by `mode`, then give memory back; what is added meanwhile waits for `WakeUp`. Asleep already: no effect.

    Level 0 pauses alone; 1 gives back keys and values and forgets the prefix cache; 2 gives back the weights too.
    """

    timeout_s: ClassVar[float] = LONG_TIMEOUT_S
    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: PauseMode = PauseMode.ABORT


class WakeUp(_Verb, frozen=True):
    """Take back what the `tags` name, everything when None; once nothing sleeps any more, resume."""

    timeout_s: ClassVar[float] = LONG_TIMEOUT_S
    tags: list[SleepTag] | None = None


class IsSleeping(_Verb, frozen=True):
    """Result: whether the scheduler is paused or something sleeps, of several engines in any."""

    result: ClassVar[Any] = bool
    join: ClassVar[Callable[[Sequence[Any]], Any]] = any


class StartProfile(_Verb, frozen=True):
    """Note the times of every step from now on."""


class StopProfile(_Verb, frozen=True):
    """Write what was noted into the folder --profile-dir, as a Chrome trace. Result: the file's path."""

    result: ClassVar[Any] = str
    join: ClassVar[Callable[[Sequence[Any]], Any]] = staticmethod(_under_names)


class ListLoras(_Verb, frozen=True):
    """Refused: LoRA is not enabled."""

    result: ClassVar[Any] = list[int]
    join: ClassVar[Callable[[Sequence[Any]], Any]] = staticmethod(_in_a_row)


class AddLora(_Verb, frozen=True):
    """Refused: LoRA is not enabled."""

    result: ClassVar[Any] = bool
    join: ClassVar[Callable[[Sequence[Any]], Any]] = all
    name: str
    path: str


class RemoveLora(_Verb, frozen=True):
    """Refused: LoRA is not enabled."""

    result: ClassVar[Any] = bool
    join: ClassVar[Callable[[Sequence[Any]], Any]] = all
    lora_id: int


class PinLora(_Verb, frozen=True):
    """Refused: LoRA is not enabled."""

    result: ClassVar[Any] = bool
    join: ClassVar[Callable[[Sequence[Any]], Any]] = all
    lora_id: int


class SaveShardedState(_Verb, frozen=True):
    """Write the model as it is loaded into the folder `path`, which `serve` can load again. Result: the files' names.

    The folder must not exist. Shards hold at most `max_size_bytes` each, a larger tensor stands alone.
    """

    timeout_s: ClassVar[float] = LONG_TIMEOUT_S
    result: ClassVar[Any] = list[str]
    path: str
    max_size_bytes: Annotated[int, Meta(ge=1)] = 2**32


class CollectiveRpc(_Verb, frozen=True):
    """Ask every rank's runner for one of a fixed set of methods. Result: the answers in order of rank."""

    result: ClassVar[Any] = list[Any]
    join: ClassVar[Callable[[Sequence[Any]], Any]] = staticmethod(_in_a_row)
    method: str
    args: list[Any] = []


class GetStats(_Verb, frozen=True):
    """Result: the scheduler's state now."""

    result: ClassVar[Any] = SchedulerStats
    join: ClassVar[Callable[[Sequence[Any]], Any]] = SchedulerStats.sum


class DumpTasks(_Verb, frozen=True):
    """Result: what the engine does right now, as text: its state, then its tasks and the lines at which they wait."""

    result: ClassVar[Any] = str
    join: ClassVar[Callable[[Sequence[Any]], Any]] = staticmethod(_under_names)


Verb = (
    ResetPrefixCache
    | Pause
    | Resume
    | IsPaused
    | Sleep
    | WakeUp
    | IsSleeping
    | StartProfile
    | StopProfile
    | ListLoras
    | AddLora
    | RemoveLora
    | PinLora
    | SaveShardedState
    | CollectiveRpc
    | GetStats
    | DumpTasks
)
"""The table of verbs."""

_NAMES = frozenset(kind.__name__ for kind in get_args(Verb))


UNSENDABLE: Final = (TypeError, ValueError, OverflowError, RecursionError)
"""What encoding raises where an argument or an answer cannot cross to another process."""


def read_verb(sent: Any) -> Verb:
    """Return the verb that `sent`, a struct or what a struct becomes on the wire, is.

    Raises:
        ValueError: There is no such verb, or an argument is wrong; the caller's fault.
        TypeError, OverflowError, RecursionError: An argument is nothing that can be sent; likewise.
    """
    plain = plain_value(sent)
    name = plain[0] if isinstance(plain, list) and plain else None
    if not isinstance(name, str) or name not in _NAMES:
        raise ValueError(f"there is no verb {name or plain!s:.80}; known are {', '.join(sorted(_NAMES))}")
    try:
        verb: Verb = msgspec.convert(plain, Verb)
    except msgspec.ValidationError as error:
        raise ValueError(f"wrong argument: {error}") from None
    return verb


def check_call(verb: Verb, timeout_s: float | None) -> None:
    """Raise TypeError or ValueError where `verb` is none, or `timeout_s` no time to wait."""
    if not isinstance(verb, msgspec.Struct):  # one that is unknown is the engine's to refuse
        raise TypeError(f"a verb is an object of one of the classes of engine.verbs, as IsPaused(), got {verb!r:.80}")
    if timeout_s is not None and not timeout_s >= 0:
        raise ValueError(f"timeout_s must be 0 seconds or more, or None for the verb's own, got {timeout_s}")


def plain_value(value: Any) -> Any:
    """Return a verb or its answer as it will arrive, whether or not there is a wire on its way.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: It holds something that cannot be sent, see `UNSENDABLE`.
    """
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def value_of(verb: Verb, value: Any, failure: Cause | None) -> Any:
    """Return the answer to `verb` in its own type.

    Raises:
        UtilityError: It failed.
    """
    if failure is not None:
        raise UtilityError(type(verb).__name__, failure)
    return msgspec.convert(value, verb.result)
