r"""Where a JSON text may be spelled with escapes of code points, `\u001f`: only where no property's name could be too.

The compiler allows them, at first, for the characters that have no other spelling, and in the names of properties that
a schema does not list for all: `{"\u0061": 1}` would be such a property, and is one named `a` to all who read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine.errors import InvalidGrammar

ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
"""The option that allows all other escapes."""
_UNSPELLABLE = re.compile(r"[\0-\x07\x0b\x0e-\x1f\x7f]")
"""Finds a character that has no escape of its own and may not stand in JSON, by the compiler, without one."""
_IN_PATTERN = re.compile(r"[\0-\x1f\x7f]|\\(?:[xu]\{?0*(?:[01]?[\da-f]|7f)\}?(?![\da-f])|c[a-z]|0)", re.IGNORECASE)
"""Finds one in an expression, raw or in one of its own escapes."""


def escapes_of(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the option of the compiler for a schema of these `parts`: none where escapes may be.

    A pattern that speaks of such characters usually allows others too, so that it gets them only where they do no harm.

    Raises:
        InvalidGrammar: A text needs such an escape, and names of properties could be spelled with them; the caller's
            fault.
    """
    texts = (text for part in parts for text in _texts_of(part))
    needed = next(filter(None, map(_UNSPELLABLE.search, texts)), None)
    patterns = (pattern for part in parts for pattern in _patterns_of(part))
    if needed is None and not any(map(_IN_PATTERN.search, patterns)):
        return ESCAPES
    named = (_names(part) for part in parts if part.get("additionalProperties") is not False)
    names = next(filter(None, named), None)
    if names is None:
        return {}
    if needed is None:
        return ESCAPES
    message = f"{needed.string!r:.80} holds U+{ord(needed[0]):04X}, which only an escape spells, and with escapes"
    message += f" property {names[0]!r:.80} could be spelled past its schema: set additionalProperties to false, or"
    raise InvalidGrammar(f"{message} leave the character out")


def _texts_of(part: dict[str, Any]) -> Iterator[str]:
    """Yield the texts that a schema, but none inside of it, has a document hold."""
    for keyword in ("const", "enum", "required"):
        yield from _texts_in(part.get(keyword))
    yield from _keys(part.get("properties"))


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        yield from _keys(value)
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(part)


def _patterns_of(part: dict[str, Any]) -> Iterator[str]:
    if isinstance(pattern := part.get("pattern"), str):
        yield pattern
    yield from _keys(part.get("patternProperties"))


def _names(part: dict[str, Any]) -> list[str]:
    """Return the names, or patterns of names, of properties that have a schema of their own."""
    return [*_keys(part.get("properties")), *_keys(part.get("patternProperties"))]


def _keys(value: Any) -> Iterable[str]:
    return value if isinstance(value, dict) else ()
