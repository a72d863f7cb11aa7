"""Forms of the text that are measured: schemas, expressions and grammars as people ask for them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "about": {"type": "string"},
    },
    "required": ["name", "email", "born", "tags", "about"],
    "additionalProperties": False,
}
_SQL = r"""start: "SELECT " columns " FROM " NAME where? order? ";"
columns: "*" | NAME ("," " "? NAME)*
where: " WHERE " condition ((" AND " | " OR ") condition)*
condition: NAME " " ("=" | "<" | ">" | "<>" | "LIKE") " " (NUMBER | TEXT)
order: " ORDER BY " NAME (" ASC" | " DESC")?
NAME: /[a-z_][a-z0-9_]{0,30}/
NUMBER: /[0-9]{1,9}/
TEXT: /'[^'\n]{0,60}'/"""
_ARITHMETIC = r"""start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,6}(\.[0-9]{1,3})?/
%ignore / {1,2}/"""
_PROGRAM = r"""start: statement+
statement: NAME " = " value "\n" | "print(" value ")\n"
value: part (" " OPERATOR " " part)*
part: NAME | NUMBER | TEXT | NAME "(" (value (", " value)*)? ")"
OPERATOR: "+" | "-" | "*" | "/"
NAME: /[a-zA-Z_][a-zA-Z0-9_]{0,30}/
NUMBER: /[0-9]{1,9}(\.[0-9]{1,4})?/
TEXT: /"[^"\n]{0,60}"/"""
_PARAGRAPHS = r"""start: line{1,20}
line: WORD (" " WORD)* "\n"
WORD: /[^ \n]{1,30}/"""

BROAD = ("line", "words", "paragraphs")
"""Forms in whose every state most of a vocabulary is allowed."""
FORMS: Mapping[str, Sequence[dict[str, Any]]] = {
    "json": [{"json": _PERSON}],
    "json_object": [{"json_object": True}],
    "choice": [{"choice": ["positive", "negative", "neutral", "neither of them, or it cannot be said"]}],
    "date": [{"regex": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"}],
    "time": [
        {"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})"}
    ],
    "email": [{"regex": r"[a-z0-9._%+-]{1,40}@[a-z0-9-]{1,30}(\.[a-z0-9-]{1,30}){0,3}\.[a-z]{2,10}"}],
    "phone": [{"regex": r"\+[0-9]{1,3} \([0-9]{2,4}\) [0-9]{3}-[0-9]{4}"}],
    "uuid": [{"regex": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}],
    "sentence": [{"regex": r"[A-Z][a-zA-Z ,']{20,300}[.!?]"}],
    "sql": [{"grammar": _SQL}],
    "arithmetic": [{"grammar": _ARITHMETIC}],
    "program": [{"grammar": _PROGRAM}],
    "line": [{"regex": r"[^\n]{20,400}"}],
    "words": [{"regex": r"\w{1,30}(\s\w{1,30}){5,80}\."}],
    "paragraphs": [{"grammar": _PARAGRAPHS}],
}
"""What a form's requests ask for in turn, by name: usual ones, and then the broad ones."""
MIX = "mix"
"""The usual ones, one after the other."""
ALL = "all"
"""Each form in a run of its own, and the mix."""


def forms_of(name: str) -> Sequence[dict[str, Any]]:
    """Return what requests ask for in turn."""
    if name == MIX:
        return list(itertools.chain(*(forms for kind, forms in FORMS.items() if kind not in BROAD)))
    return FORMS[name]
