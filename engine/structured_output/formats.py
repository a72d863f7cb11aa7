"""Formats of JSON schema that the compiler knows only roughly, as expressions that allow nothing wrong.

February has 29 days in leap years alone, no minute has 61 seconds (the few that had are left out), and no host's name
is longer than 253 characters or has two hyphens in a row, for those may begin another spelling (`xn--`), whose rules no
expression holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_MINUTE = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_MINUTE})"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PARTS = r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"

_EXACT: Mapping[str, list[dict[str, Any]]] = {
    "date": [{"pattern": f"^{_DATE}$"}],
    "time": [{"pattern": f"^{_TIME}$"}],
    "date-time": [{"pattern": f"^{_DATE}[Tt]{_TIME}$"}],
    "hostname": [{"pattern": rf"^{part}(?:\.{part})*$", "maxLength": 253} for part in (_LABEL, _PARTS)],
}


def make_exact(schema: dict[str, Any]) -> None:
    """Say in `schema`, but not in those inside of it, by expressions what it says by a format; in place."""
    exact = _EXACT.get(str(schema.get("format")))
    if exact is not None and isinstance(others := schema.get("allOf", []), list):
        del schema["format"]
        schema["allOf"] = [*others, *exact]
