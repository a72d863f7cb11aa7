"""One request's sampling wishes: validated on construction, frozen, the same in Python, over HTTP and on the wire.

Every field is obeyed or refused by name. What only the input processor can know (the model's EOS ids, a seed drawn
for a request without one, the default of `max_tokens`) is resolved into a copy before the request leaves the client.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from engine.errors import InvalidRequest

MAX_N = 128
"""Most completions one request may ask for."""
MAX_STOP_STRINGS = 64
"""Most stop strings one request may carry."""
MAX_STOP_CHARS = 1024
"""Longest stop string: text that may become one is held back and searched at each token."""
MAX_STOP_TOKEN_IDS = 128
"""Most stop token ids one request may carry: each is compared with each token."""
MAX_PATTERN_SIZE = 128
"""Longest repeated pattern looked for: each size is tried at each token."""
MAX_PATTERN_COUNT = 1024
"""Most repetitions that may be asked for."""
MAX_TOP_K = 2**31 - 1
"""No vocabulary is larger; what is sent must fit a word."""
GREEDY_BELOW = 1e-5
"""Temperatures under this take the arg max; no scaling is applied."""


_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "skip_reading_prefix_cache")


class OutputKind(enum.StrEnum):
    """What each output of a stream holds: what is new, all so far, or only the whole at the end."""

    DELTA = "delta"
    CUMULATIVE = "cumulative"
    FINAL_ONLY = "final_only"


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When output that goes round in circles is ended, with finish reason `repetition`.

    Attributes:
        max_pattern_size: Longest pattern looked for, in tokens; 0 for none.
        min_pattern_size: Shortest pattern looked for.
        min_count: Times in a row that a pattern must have come.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 2

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: A value is of the wrong type or out of its range; the caller's fault.
        """
        try:
            _check_int("max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
            _check_int("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
            _check_int("min_count", self.min_count, 2, MAX_PATTERN_COUNT)
        except InvalidRequest as error:
            raise InvalidRequest(f"repetition_detection: {error}", param="repetition_detection") from None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to draw tokens and when to stop.

    Attributes:
        n: Completions to draw for the prompt, 1 to 128. Child i of a seeded request uses seed + i.
        temperature: 0 to 2; 0 takes the most likely token.
        top_k: Keep this many most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most likely tokens with at least this probability; in (0, 1].
        min_p: Drop tokens less likely than this share of the most likely one; in [0, 1].
        seed: Draws depend only on (seed, position); None lets the client draw a seed.
        max_tokens: Most tokens to generate, at least 1; None means up to the context's end.
        min_tokens: No end (EOS, stop token or stop string) before this many tokens.
        stop: Strings that end the text.
        stop_token_ids: Token ids that end the text.
        repetition_detection: End output that goes round in circles; see `RepetitionDetection`.
        skip_reading_prefix_cache: Compute the whole prompt, whatever is cached; what is computed can still be hit.
        ignore_eos: Go on past the end-of-sequence token.
        include_stop_str_in_output: Keep the stop string or stop token in the text.
        skip_special_tokens: Leave special tokens out of the text.
        output_kind: See `OutputKind`; None takes the call's default.
        eos_token_ids: The model's end tokens; resolved by the input processor, never by users.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_detection: RepetitionDetection | None = None
    skip_reading_prefix_cache: bool = False
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    output_kind: OutputKind | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: A value is of the wrong type or out of its range; the caller's fault.
        """
        stop: Any = self.stop
        _freeze(self, "stop", (stop,) if isinstance(stop, str) else stop, str)
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _freeze(self, "stop_token_ids", self.stop_token_ids, int)
        _freeze(self, "eos_token_ids", self.eos_token_ids, int)
        _check_int("n", self.n, 1, MAX_N)
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_int("top_k", self.top_k, -1, MAX_TOP_K)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be greater than 0 and at most 1, got 0", param="top_p")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}", param=name)
        _check_count("stop", self.stop, MAX_STOP_STRINGS)
        for text in self.stop:
            _check_stop_string(text)
        detection: Any = self.repetition_detection
        if detection is not None and not isinstance(detection, RepetitionDetection):
            msgspec.structs.force_setattr(self, "repetition_detection", _repetition_detection(detection))
        if self.output_kind is not None:
            msgspec.structs.force_setattr(self, "output_kind", _output_kind(self.output_kind))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


def check_text(name: str, text: str | None) -> None:
    """Refuse lone surrogates in `text`: they are no characters and cannot be sent.

    Raises:
        InvalidRequest: Naming the parameter; the caller's fault.
    """
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        message = f"{name} must be valid Unicode without lone surrogates, got {ascii(text)[:40]}"
        raise InvalidRequest(message, param=name) from None


def _check_count(name: str, values: Any, most: int) -> None:
    if isinstance(values, list | tuple) and len(values) > most:
        raise InvalidRequest(f"{name} may hold at most {most} values, got {len(values)}", param=name)


def _check_stop_string(text: str) -> None:
    if not text:
        raise InvalidRequest("stop must not hold an empty string: it would end every text at once", param="stop")
    if len(text) > MAX_STOP_CHARS:
        raise InvalidRequest(
            f"a stop string may have at most {MAX_STOP_CHARS} characters, got {len(text)}", param="stop"
        )
    check_text("stop", text)


def _repetition_detection(value: Any) -> RepetitionDetection:
    known = RepetitionDetection.__struct_fields__
    if not isinstance(value, dict) or not value.keys() <= set(known):
        message = f"repetition_detection must be an object of {', '.join(known)}, got {value!r}"
        raise InvalidRequest(message, param="repetition_detection")
    return RepetitionDetection(**value)


def _output_kind(value: Any) -> OutputKind:
    try:
        return OutputKind(value)
    except ValueError:
        allowed = ", ".join(OutputKind)
        raise InvalidRequest(f"output_kind must be one of {allowed}, got {value!r}", param="output_kind") from None


def _freeze(params: SamplingParams, name: str, values: Any, kind: type) -> None:
    """Store a list-like field as a tuple of `kind`."""
    if not isinstance(values, list | tuple):
        raise InvalidRequest(f"{name} must be a list of {kind.__name__}, got {values!r}", param=name)
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRequest(f"{name} must hold only {kind.__name__} values, got {value!r}", param=name)
        if isinstance(value, int) and not 0 <= value < 2**31:
            raise InvalidRequest(f"{name} must hold token ids from 0 to {2**31 - 1}, got {value}", param=name)
    msgspec.structs.force_setattr(params, name, tuple(values))


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a whole number, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"{name} must be {limit}, got {value}", param=name)


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low:g} to {high:g}, got {value!r}", param=name)
