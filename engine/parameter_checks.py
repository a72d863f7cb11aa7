"""Checks of single values that callers give, each refused with its name, the value and the limit."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from engine.errors import InvalidRequest

_MAX_SHOWN_CHARS = 80
_MAX_SHOWN_BITS = 256


def shown(value: Any) -> str:
    """Return `value` for a message: cut where it is long, and a number that is too large to print by its size."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"a whole number of {value.bit_length()} bits"
    try:
        return f"{value!r:.{_MAX_SHOWN_CHARS}}"
    except ValueError:  # a list, say, with a number inside that Python does not print
        return f"a {type(value).__name__}"


def check_int(name: str, value: Any, low: int, high: int | None) -> None:
    """Refuse what is no whole number from `low` to `high`, or no upper limit.

    Raises:
        InvalidRequest: The caller's fault.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a whole number, got {shown(value)}", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"{name} must be {limit}, got {shown(value)}", param=name)


def check_number(name: str, value: Any, low: float, high: float, *, is_above: bool = False) -> None:
    """Refuse what is no finite number from `low`, or `is_above` it, to `high`.

    Raises:
        InvalidRequest: The caller's fault.
    """
    span = f"greater than {low:g} and at most {high:g}" if is_above else f"from {low:g} to {high:g}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequest(f"{name} must be a finite number {span}, got {shown(value)}", param=name)
    if not low <= value <= high or (is_above and value == low):
        raise InvalidRequest(f"{name} must be {span}, got {shown(value)}", param=name)


def check_count(name: str, values: Any, most: int) -> None:
    """Refuse a list of more than `most` values.

    Raises:
        InvalidRequest: The caller's fault.
    """
    if isinstance(values, list | tuple) and len(values) > most:
        raise InvalidRequest(f"{name} may hold at most {most} values, got {len(values)}", param=name)


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


def freeze_list(params: msgspec.Struct, name: str, values: Any, kind: type) -> None:
    """Store a list-like field of a frozen struct as a tuple of `kind`; whole numbers are token ids.

    Raises:
        InvalidRequest: It is no list, or holds something else; the caller's fault.
    """
    if not isinstance(values, list | tuple):
        raise InvalidRequest(f"{name} must be a list of {kind.__name__}, got {shown(values)}", param=name)
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRequest(f"{name} must hold only {kind.__name__} values, got {shown(value)}", param=name)
        if isinstance(value, int) and not 0 <= value < 2**31:
            raise InvalidRequest(f"{name} must hold token ids from 0 to {2**31 - 1}, got {shown(value)}", param=name)
    msgspec.structs.force_setattr(params, name, tuple(values))
