"""MODELS.md says what is so: every causal language model that transformers has, put before the guard.

METRONOME_REWRITE=1 writes it anew.
"""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import UnsupportedModel
from engine.models.families import DECODERS
from engine.models.guard import inspect
from engine.models.transformers_backend import ATTENTION_NAME, Body

DOCUMENT = Path(__file__).parents[2] / "MODELS.md"
HEAD = f"""# Which models run

Written by `tests/models/test_models_document.py` from what it finds, with transformers {transformers.__version__}.

`--model-impl auto` takes our own decoder where config.json names one of its architectures, with no other model_type
than that family's, and asks for nothing that it does not do; else the model of transformers, with attention over our
pages, if that passes the guard of `engine/models/guard.py`; else it refuses, with both reasons. `own` and
`transformers` allow one alone. Code in a model folder is never run.
"""
PROMISE = """These pass the guard, which runs the loaded model itself each time an engine starts, as tiny random models;
a checkpoint whose config.json asks for other kinds of layers may fare otherwise. Those that
`tests/models/test_transformers_backend.py` names are compared with transformers' eager attention through the whole
engine too. On this path the matrix products are the library's, which picks its order of summation by the number of
rows: the last bits of a request's logits may depend on its neighbours in a step. With our own decoder they do not.
"""
NOT_TRIED = "No tiny model of them was made; the guard decides when an engine starts.\n"
CHECKS = ("call a layer", "positions", "layer types", "windows", "eager", "two sequences", "chunks", "last position")


@pytest.fixture
def quiet() -> Iterator[None]:
    """No warnings about classes that cannot do what they are asked here."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(level)


def outcome(draw_model: Any, model_type: str) -> tuple[str, str]:
    """Return the check that failed, "runs" or "not tried", and the detail."""
    try:
        model = draw_model(model_type)
    except Exception as error:
        return "not tried", " ".join(str(error).split())
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        inspect(Body(model), max_positions=64)
    except UnsupportedModel as error:
        found = re.search(r"check '(.*?)' failed: (.*)", str(error), re.DOTALL)
        assert found is not None
        return found[1], " ".join(found[2].split())
    return "runs", ""


def document(outcomes: dict[str, tuple[str, str]]) -> str:
    """Write MODELS.md."""
    by_kind: dict[str, list[str]] = {}
    for architecture, (kind, _) in outcomes.items():
        by_kind.setdefault(kind, []).append(architecture)
    runs, untried = by_kind.pop("runs"), by_kind.pop("not tried")
    rows = [
        f"| {architecture} | {check} | {outcomes[architecture][1].replace('|', '/')} |"
        for check in (*CHECKS, *sorted(by_kind.keys() - {*CHECKS}))
        for architecture in by_kind.get(check, [])
    ]
    parts = [
        HEAD,
        f"## Our own decoder: {len(DECODERS)} architectures\n\n" + _wrapped(sorted(DECODERS)),
        f"## Through transformers: {len(runs)} architectures\n\n{PROMISE}\n" + _wrapped(runs),
        f"## Refused: {len(rows)} architectures\n\n| architecture | check | what failed |\n|---|---|---|\n"
        + "\n".join(rows)
        + "\n",
        f"## Not tried: {len(untried)} architectures\n\n{NOT_TRIED}\n" + _wrapped(untried),
    ]
    return "\n".join(parts)


def _wrapped(names: list[str]) -> str:
    return textwrap.fill(", ".join(names), 118, break_long_words=False) + "\n"


def is_of_older_transformers(written: str) -> bool:
    """Whether the document names a transformers that is older than this one; one that names none is wrong."""
    found = re.search(r"with transformers (\d[\w.]*)\.\n", written)
    return found is not None and Version(found[1]) < Version(transformers.__version__)


def test_only_a_document_of_an_older_transformers_is_not_compared() -> None:
    assert not is_of_older_transformers(HEAD)
    assert not is_of_older_transformers("")
    assert not is_of_older_transformers(HEAD.replace(transformers.__version__, "999.0"))
    assert not is_of_older_transformers(HEAD.replace("Written by", "By"))
    assert is_of_older_transformers(HEAD.replace(transformers.__version__, "5.0.0"))


@pytest.mark.slow
def test_models_md_says_what_runs_and_what_is_refused_and_why(draw_model: Any, quiet: None) -> None:
    model_types = {architecture: name for name, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    model_types |= {"LlamaForCausalLM": "llama", "DeepseekV3ForCausalLM": "deepseek_v3", "GPT2LMHeadModel": "gpt2"}
    assert set(DECODERS) <= set(model_types)
    written = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    rewrites = os.environ.get("METRONOME_REWRITE") == "1"
    if is_of_older_transformers(written) and not rewrites:
        pytest.skip(f"MODELS.md was written before transformers {transformers.__version__} was there")
    found = document({name: outcome(draw_model, model_types[name]) for name in sorted(model_types)})
    if rewrites:
        DOCUMENT.write_text(found)
        pytest.skip("MODELS.md is written anew")
    assert written == found, "METRONOME_REWRITE=1 writes MODELS.md anew"
