"""What a user may ask of an output's form: one kind, checked as far as that takes no compiler.

Part of `SamplingParams`, so ground: the standard library, msgspec, numpy and errors. What a schema or grammar means
is found out by whoever compiles it, in the engine.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np

from engine.errors import InvalidGrammar

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_GRAMMAR_CHARS = 65_536
"""Longest schema, expression or grammar, and most characters of all choices together."""
MAX_NESTING = 128
"""Most levels of objects and lists in a schema: a fixed limit, for how deep Python gets depends on who asks."""
MAX_CHOICES = 2048
"""Most texts to choose from."""
MAX_TAGS = 128
"""Most structures of a structural tag, and most triggers: each trigger is looked for in each other one."""
MAX_TRIGGER_CHARS = 128
"""Longest trigger."""
MAX_PATTERN_CHARS = 256
"""Longest whitespace pattern."""
WHITESPACE = r"[ \t\n\r]{1,64}"
"""Between the parts of a JSON document, unless asked otherwise: enough for deep indentation, and no endless loop."""
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
"""Finds texts in JSON, which end where the whole does if they are not ended: brackets in them are none."""
_LEVELS = np.zeros(256, np.int8)
"""How many levels deeper a byte of JSON leads."""
_LEVELS[[*b"[{"]], _LEVELS[[*b"]}"]] = 1, -1
BEGINS_CALL = re.compile(r'{"name": "([^"]+)", "arguments": $')
"""Tells the function of a call with which a structure begins."""
_FUNCTION = re.compile(rf"// schema of (.+)$|{BEGINS_CALL.pattern}", re.MULTILINE)
"""Tells it in a line of a grammar too."""
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties")


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The form that a request's text must have; exactly one of the first six fields.

    Attributes:
        json: A JSON schema, as text or as an object; kept as text. The text is one document that it allows.
        json_object: True for any JSON object.
        regex: A regular expression that matches the whole text.
        choice: Texts of which the output is one.
        grammar: A grammar in Lark's notation, or in GBNF (EBNF with `::=`).
        structural_tag: An object of `structures` (begin, schema, end) and `triggers`, as text or as an object; free
            text, in which a trigger begins one of the structures.
        disable_any_whitespace: With JSON: no whitespace between its parts.
        disable_additional_properties: With a schema: objects have no property that it does not list.
        whitespace_pattern: With JSON: an expression for the whitespace between its parts.
        is_normal: Set here once all is checked and made one spelling, so that who is sent it does not do that again;
            false where a copy is changed, for that is then checked.
    """

    json: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    is_normal: bool = False

    def __post_init__(self) -> None:
        """Check every field, unless that was done where it comes from.

        Raises:
            InvalidGrammar: None or several kinds, or a value that cannot mean anything; the caller's fault.
        """
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidGrammar(f"give exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}")
        if self.is_normal is True:
            return
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidGrammar(f"{name} must be true or false, got {_shown(getattr(self, name))}")
        self._check_options(given[0])
        match given[0]:
            case "json" | "structural_tag" as kind:
                msgspec.structs.force_setattr(self, kind, _object_text(kind, getattr(self, kind)))
            case "json_object":
                if self.json_object is not True:
                    raise InvalidGrammar(
                        f"json_object must be true, got {_shown(self.json_object)}; leave it out for none"
                    )
            case "choice":
                msgspec.structs.force_setattr(self, "choice", _choices(self.choice))
            case kind:
                _check_text(kind, getattr(self, kind))
        if self.structural_tag is not None:
            _check_structural_tag(json.loads(self.structural_tag))
        msgspec.structs.force_setattr(self, "is_normal", True)

    @property
    def kind(self) -> str:
        """The field that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def _check_options(self, kind: str) -> None:
        """Refuse options that the kind has no use for, or that contradict each other."""
        makes_json = kind in {"json", "json_object", "structural_tag"}
        pattern: Any = self.whitespace_pattern
        if pattern is not None:
            _check_text("whitespace_pattern", pattern, MAX_PATTERN_CHARS)
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            if getattr(self, name) and not makes_json:
                raise InvalidGrammar(
                    f"{name} needs json, json_object or structural_tag, and this is {kind}: leave it out"
                )
        if pattern is not None and self.disable_any_whitespace:
            raise InvalidGrammar("whitespace_pattern contradicts disable_any_whitespace: give one of them")
        if self.disable_additional_properties and kind != "json":
            raise InvalidGrammar(f"disable_additional_properties needs json, and this is {kind}: leave it out")


def structured_outputs_params(value: Any) -> StructuredOutputsParams:
    """Return `value`, a struct or an object of its fields, as a checked struct.

    Raises:
        InvalidGrammar: It is neither, has an unknown field, or fails a check; the caller's fault.
    """
    if isinstance(value, StructuredOutputsParams):
        return value
    known = [name for name in StructuredOutputsParams.__struct_fields__ if name != "is_normal"]
    if not isinstance(value, dict):
        raise InvalidGrammar(f"an object of {', '.join(known)} is needed, got {_shown(value)}")
    unknown = sorted(map(str, value.keys() - set(known)))
    if unknown:
        raise InvalidGrammar(f"unknown field {unknown[0]!r:.80}; known are {', '.join(known)}")
    fields: dict[str, Any] = {name: field for name, field in value.items() if field is not None}
    return StructuredOutputsParams(**fields)


def shown_form(asked: StructuredOutputsParams) -> str:
    """Return by which words a user knows the form: its beginning, or the functions of whose calls it was made."""
    value = getattr(asked, asked.kind)
    parts = [asked.grammar or ""]
    if asked.structural_tag is not None:
        parts = [structure["begin"] for structure in json.loads(asked.structural_tag)["structures"]]
    names = [found[1] or found[2] for part in parts for found in _FUNCTION.finditer(part)]
    return f"the form of calls of {', '.join(names):.80}" if names else f"{asked.kind} {_shown(value)}"


def _shown(value: Any) -> str:
    return f"{value!r:.80}"


def _check_text(name: str, text: Any, most: int = MAX_GRAMMAR_CHARS) -> None:
    if not isinstance(text, str):
        raise InvalidGrammar(f"{name} must be text, got {_shown(text)}")
    if not text:
        raise InvalidGrammar(f"{name} must not be empty")
    if len(text) > most:
        raise InvalidGrammar(f"{name} must have at most {most} characters, got {len(text)}")
    if "\0" in text:
        raise InvalidGrammar(f"{name} must not hold the character NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidGrammar(f"{name} must be valid Unicode without lone surrogates, got {ascii(text)[:40]}") from None


def _object_text(name: str, value: Any) -> str:
    """Return an object that is given as itself or as text, as text with its keys in their order."""
    if isinstance(value, str):
        _check_text(name, value)
        _check_nesting(name, value)  # which the reader would fail by
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidGrammar(f"{name} must be JSON, got {_shown(value)}: {error}") from None
    if not isinstance(value, dict):
        raise InvalidGrammar(f"{name} must be a JSON object, got {_shown(value)}")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidGrammar(f"{name} must be nested at most {MAX_NESTING} levels deep, got many more") from None
    except (TypeError, ValueError) as error:
        raise InvalidGrammar(f"{name} must be of JSON's own types: {error}") from None
    _check_text(name, text)
    _check_nesting(name, text)
    return text


def _check_nesting(name: str, text: str) -> None:
    """Refuse JSON that is nested too deeply; anything else may pass."""
    steps = _LEVELS[np.frombuffer(_TEXTS.sub("", text).encode(), np.uint8)]
    deepest = int(np.cumsum(steps, dtype=np.int32).max(initial=0))
    if deepest > MAX_NESTING:
        raise InvalidGrammar(f"{name} must be nested at most {MAX_NESTING} levels deep, got {deepest}: make it simpler")


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, list | tuple) and len(choices) > MAX_CHOICES:
        raise InvalidGrammar(f"choice must have at most {MAX_CHOICES} texts, got {len(choices)}")
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(text, str) for text in choices):
        raise InvalidGrammar(f"choice must be a list of texts, at least one, got {_shown(choices)}")
    if not all(choices):
        raise InvalidGrammar("choice must hold no empty text")
    _check_text("choice", "".join(choices))
    return tuple(choices)


def _check_structural_tag(tag: dict[str, Any]) -> None:
    """Check the form of a structural tag; its schemas are the compiler's."""
    if "format" in tag:
        raise InvalidGrammar("structural_tag must have structures and triggers; the form with format is not supported")
    if not tag.keys() <= {"type", "structures", "triggers"} or tag.get("type", "structural_tag") != "structural_tag":
        raise InvalidGrammar(f"structural_tag must have structures and triggers alone, got {_shown(list(tag))}")
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(text, str) and text for text in triggers):
        raise InvalidGrammar(f"structural_tag: triggers must be a list of texts, at least one, got {_shown(triggers)}")
    if not isinstance(structures, list) or not structures:
        raise InvalidGrammar(f"structural_tag: structures must be a list, at least one, got {_shown(structures)}")
    for name, parts in (("triggers", triggers), ("structures", structures)):
        if len(parts) > MAX_TAGS:
            raise InvalidGrammar(f"structural_tag may have at most {MAX_TAGS} {name}, got {len(parts)}")
    _check_triggers(triggers)
    for index, structure in enumerate(structures):
        _check_structure(f"structural_tag: structures[{index}]", structure, triggers)
    for trigger in triggers:
        if not any(structure["begin"].startswith(trigger) for structure in structures):
            raise InvalidGrammar(f"structural_tag: trigger {_shown(trigger)} begins no structure: leave it out")


def _check_triggers(triggers: list[str]) -> None:
    longest = max(map(len, triggers))
    if longest > MAX_TRIGGER_CHARS:
        message = f"structural_tag: a trigger may have at most {MAX_TRIGGER_CHARS} characters, got {longest}"
        raise InvalidGrammar(message)
    for trigger in triggers:
        sooner = next((other for other in triggers if other in trigger[:-1]), None)
        if sooner is not None:
            message = f"structural_tag: trigger {_shown(trigger)} is never reached, for {_shown(sooner)} comes before"
            raise InvalidGrammar(f"{message} its end: leave one of them out")


def _check_structure(where: str, structure: Any, triggers: list[str]) -> None:
    if not isinstance(structure, dict) or structure.keys() != {"begin", "schema", "end"}:
        raise InvalidGrammar(f"{where} must have begin, schema and end, got {_shown(structure)}")
    begin = structure["begin"]
    if not isinstance(begin, str) or not isinstance(structure["end"], str):
        raise InvalidGrammar(f"{where} must have texts as begin and end")
    if not any(begin.startswith(trigger) for trigger in triggers):
        raise InvalidGrammar(f"{where} must begin with one of the triggers {_shown(triggers)}, got {_shown(begin)}")
    if not isinstance(structure["schema"], dict):
        raise InvalidGrammar(f"{where} must have a JSON schema, an object, got {_shown(structure['schema'])}")
