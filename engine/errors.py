"""The exception tree: every error says whose fault it is.

::

    MetronomeError
    ├── ConfigError               the operator: a flag, a file or a machine that does not fit (exit code 2)
    ├── ModelError                the model folder
    │   ├── UnsupportedModel      a model that this engine would not run correctly, with the failed check
    │   └── CheckpointError       a file that is missing, truncated or misshapen
    ├── RequestError              the caller of one request; `status_hint` is the HTTP status
    │   ├── InvalidRequest 400
    │   │   ├── PromptTooLong 400
    │   │   └── InvalidGrammar 400
    │   ├── NotFound 404
    │   ├── QueueFull 429
    │   └── RequestAborted 499    the request was aborted by someone other than the waiter
    │       └── EngineStopping 503    the engine takes nothing new
    ├── UtilityError              one verb failed, alone; `cause` says whose fault
    │   └── UtilityTimeout 504    no answer came in time
    └── EngineDeadError 503       the engine itself, with its cause
        └── ExecutorDead          its worker thread or a rank

Wrong input is a `ValueError` too. A message shows the value, the limit and what to do. `transport.DecodeError` stands
outside: transport knows nothing of ours.
"""

from __future__ import annotations

import traceback

import msgspec


class Cause(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Why an engine or a request ended, in a form that crosses process boundaries.

    Attributes:
        type: The exception's class name; set where it was caught.
        message: Its message, complete in itself.
        traceback: The traceback as text, for the log; empty where there was none.
        phase: The start phase that failed, empty once the engine was ready.
        exit_status: The exit status of a process that died, or minus the signal that killed it.
        causes: What led to it (`raise ... from`, a dead engine's own cause) and, from an exception group, what failed
            beside it; a few levels deep.
    """

    type: str
    message: str
    traceback: str = ""
    phase: str = ""
    exit_status: int | None = None
    causes: tuple[Cause, ...] = ()

    @classmethod
    def of(cls, error: BaseException, phase: str = "") -> Cause:
        """Describe `error`; of an exception group the one failure that explains the rest, with the rest in `causes`."""
        return _describe(error, phase, MAX_DEPTH)

    def at(self, where: str) -> Cause:
        """Return this cause with the name of where it arose before its message."""
        return msgspec.structs.replace(self, message=f"{where}: {self.message}")

    def __str__(self) -> str:
        where = f" (while starting: {self.phase})" if self.phase else ""
        return f"{self.type}: {self.message}{where}"


MAX_DEPTH = 3
"""Levels of causes below the first that are told."""
MAX_BESIDE = 8
"""Failures beside the first that are told."""
MAX_TRACEBACK_CHARS = 20_000
"""Of a traceback, its end."""


def _describe(error: BaseException, phase: str, depth: int) -> Cause:
    root = root_cause(error)
    causes: list[Cause] = []
    exit_status = None
    if isinstance(root, EngineDeadError):
        causes, exit_status = [root.cause], root.cause.exit_status
    if depth:
        led_to_it = [root.__cause__] if root.__cause__ is not None else []
        beside = [leaf for leaf in _leaves(error) if leaf is not root and type(leaf).__name__ != "Cancelled"]
        causes += [_describe(other, "", depth - 1) for other in led_to_it + beside[:MAX_BESIDE]]
    text = "".join(traceback.format_exception(root))[-MAX_TRACEBACK_CHARS:]
    name = type(root).__name__
    return Cause(name, str(root) or name, text, phase, exit_status, tuple(causes))


class MetronomeError(Exception):
    """Base of everything this engine raises on purpose."""


class ConfigError(MetronomeError, ValueError):
    """The operator asked for something that cannot be had; the message names value, limit and remedy."""


class ModelError(MetronomeError):
    """The model at the given path cannot be served."""


class UnsupportedModel(ModelError):
    """The architecture, tokenizer or form of this model is not one the engine runs correctly."""


class CheckpointError(ModelError):
    """A model file is missing, truncated, corrupt or misshapen."""


class RequestError(MetronomeError, ValueError):
    """One request failed, alone. `status_hint` is the HTTP status that fits; `param` names the field at fault."""

    status_hint = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Keep `message` for people and `param`, the request field at fault, for programs."""
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A parameter of the request is wrong; nothing was started."""


class PromptTooLong(InvalidRequest):
    """Prompt and asked tokens cannot fit the context or the KV cache."""


class InvalidGrammar(InvalidRequest):
    """What the output must match is wrong, contradicts itself, or takes more to compile than it may."""

    def __init__(self, message: str, *, param: str = "structured_outputs") -> None:
        """Say what is wrong; the field is always the same."""
        super().__init__(f"{param}: {message}", param=param)


class NotFound(RequestError):
    """The named model or object does not exist."""

    status_hint = 404


class QueueFull(RequestError):
    """As many requests wait as may wait; try again later."""

    status_hint = 429


class RequestAborted(RequestError):
    """The request was aborted before it was complete."""

    status_hint = 499


class EngineStopping(RequestAborted):
    """The engine is being shut down: nothing was started; ask another one, or later."""

    status_hint = 503


class UtilityError(MetronomeError):
    """A call of one verb failed; the engine runs on. `cause` has type and message of what went wrong."""

    def __init__(self, verb: str, cause: Cause) -> None:
        """Name the `verb` that failed for `cause`."""
        super().__init__(f"Call to {verb} failed: {cause.type}: {cause.message}")
        self.cause = cause
        self.status_hint = _UTILITY_STATUS.get(cause.type, 500)


class UtilityTimeout(UtilityError, TimeoutError):
    """The caller's time was over before the answer came; what was asked for may still be done."""

    def __init__(self, verb: str, timeout_s: float, cause: Cause | None = None) -> None:
        """Name the `verb` that was not answered within `timeout_s`; `cause` says more than that."""
        late = Cause("UtilityTimeout", f"no answer within {timeout_s:g} seconds; it may still come")
        super().__init__(verb, cause or late)
        self.timeout_s = timeout_s


_UTILITY_STATUS = {
    "ValueError": 400,
    "NotEnabled": 400,
    "Resumed": 409,
    "Overtaken": 409,
    "EngineStopping": 503,
    "UtilityTimeout": 504,
}
"""What HTTP says to a failed verb, by the type of its cause."""


class StepTimeout(MetronomeError):
    """Work was pending and no step ended in time: the engine ends."""


class NotEnabled(MetronomeError):
    """What was asked for is switched off, or not built, in this engine."""


class EngineDeadError(MetronomeError):
    """The engine has ended; every waiter gets this with the same cause."""

    status_hint = 503

    def __init__(self, cause: Cause) -> None:
        """Carry `cause`, what ended the engine."""
        super().__init__(str(cause))
        self.cause = cause


class ExecutorDead(EngineDeadError):
    """The executor lost its worker: no further step can run."""


_STARTUP_ERRORS: dict[str, type[MetronomeError]] = {
    kind.__name__: kind for kind in (ConfigError, ModelError, UnsupportedModel, CheckpointError)
}


def startup_error(cause: Cause) -> MetronomeError:
    """Return the exception to raise where an engine failed to start: the operator's own error if it was one."""
    kind = _STARTUP_ERRORS.get(cause.type)
    return kind(cause.message) if kind is not None else EngineDeadError(cause)


def root_cause(error: BaseException) -> BaseException:
    """Unwrap exception groups to the one exception that explains the others.

    What a sibling met because of the failure (cancellation, a closed or broken resource) ranks last, a lost worker just
    before: it may have been given up for the failure. The rest is kept as notes on the exception returned.
    """
    leaves = list(_leaves(error))
    leaves.sort(key=lambda leaf: _FOLLOW_UPS.get(type(leaf).__name__, 0))
    first, *rest = leaves
    for other in rest:
        note = f"also failed: {type(other).__name__}: {other}"
        if type(other).__name__ != "Cancelled" and note not in getattr(first, "__notes__", ()):
            first.add_note(note)
    return first


_FOLLOW_UPS = {
    "WorkerLost": 1,
    "ExecutorDead": 1,
    "BrokenResourceError": 2,
    "ClosedResourceError": 2,
    "EndOfChannel": 2,
    "Cancelled": 2,
}
"""What explains less than others, by how little."""


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
