"""Calls that may come, where a model decides: the form of a text in which whatever is read as a call is a valid one.

Only for formats whose calls a grammar can describe: that of Python calls is none, for a JSON schema says nothing of
Python's literals; and no grammar spells special tokens, which the markers of some models are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from engine.client.parsers.forced import BOUNDED_SPACES, arguments_rule
from engine.sampling_params import StructuredOutputsParams, structured_outputs_params

Functions = Sequence[tuple[str, dict[str, Any]]]
"""Names of functions and the schemas of their arguments."""
FormOfCalls = Callable[[Functions], StructuredOutputsParams]


def tagged_calls(marker: str, before_name: str, behind_arguments: str) -> FormOfCalls:
    """Return the form of text in which `marker` begins a call: an object of name and arguments between the others."""

    def form(functions: Functions) -> StructuredOutputsParams:
        structures = [
            {
                "begin": f'{marker}{before_name}{{"name": {json.dumps(name)}, "arguments": ',
                "schema": schema,
                "end": f"}}{behind_arguments}",
            }
            for name, schema in functions
        ]
        return structured_outputs_params({"structural_tag": {"structures": structures, "triggers": [marker]}})

    return form


def calls_alone(functions: Functions) -> StructuredOutputsParams:
    """Return the form of a text that is calls from its start, as Llama 3's, or does not begin like one."""
    calls = [f"call_{i}" for i in range(len(functions))]
    lines = [
        'start: TEXT | call ("; " call)*',
        r"TEXT: /(?s:\s*([^\s{<].*|<([^|].*)?))?/",
        f"call: {' | '.join(calls)}",
    ]
    for call, (name, schema) in zip(calls, functions, strict=True):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "parameters": ')
        rule = arguments_rule(f"{call}_arguments", name, schema, BOUNDED_SPACES)
        lines += [f'{call}: {head} {call}_arguments "}}"', rule]
    return structured_outputs_params({"grammar": "\n".join(lines)})
