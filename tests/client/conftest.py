"""Faces of an engine to open, and texts on which tokenizers differ."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable

import pytest

from tests.client.faces import FACES, Open

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<|im_start", "im_end|>"]
CODE = [
    "def f(x):\n    return x**2\n",
    "for(int i=0;i<10;++i){a[i]=0x1F;}",
    "SELECT * FROM t;",
    '{"a": [1, 2.5e-3]}',
    "\t\t//",
]
WORDS = [
    "it's",
    "WE'LL",
    "hello",
    " world",
    "naïve",
    "Zürich",
    "3.14159",
    "1,000,000",
    "2026-01-31",
    "user@example.org",
]


@pytest.fixture(scope="session")
def draw_texts() -> Callable[[int, int], list[str]]:
    """A function from count and seed to texts."""
    return drawn_texts


def characters_by_category() -> dict[str, list[str]]:
    by_category: dict[str, list[str]] = {}
    for code in range(0x30000):
        category = unicodedata.category(chr(code))
        if category != "Cs":
            by_category.setdefault(category, []).append(chr(code))
    return by_category


def drawn_texts(count: int, seed: int) -> list[str]:
    """Texts of every Unicode category, whitespace runs, digits, code, special tokens, emoji and combining marks."""
    draw = random.Random(seed)
    categories = characters_by_category()
    kinds = sorted(categories)

    def piece() -> str:
        match draw.randrange(9):
            case 0:
                return "".join(draw.choices(categories[draw.choice(kinds)], k=draw.randrange(1, 5)))
            case 1:
                return "".join(draw.choices(" \t\n\r\x0b\x0c\u00a0\u2003\u3000\u200b", k=draw.randrange(1, 8)))
            case 2:
                return "".join(draw.choices("0123456789\u0660\u0661\u0662²½Ⅷ", k=draw.randrange(1, 7)))
            case 3:
                return draw.choice(CODE)
            case 4:
                return draw.choice(SPECIAL)
            case 5:
                return "".join(draw.choices(["👩‍👩‍👧", "🏳️‍🌈", "👍🏽", "🇨🇭", "😀", "❤️"], k=draw.randrange(1, 3)))
            case 6:
                return draw.choice("aeoñк한") + "".join(
                    draw.choices("\u0301\u0308\u0327\u20dd\u0591", k=draw.randrange(1, 4))
                )
            case 7:
                return "".join(chr(draw.randrange(0x20, 0x7F)) for _ in range(draw.randrange(1, 12)))
            case _:
                return draw.choice(WORDS)

    return ["".join(piece() for _ in range(draw.randrange(0, 9))) for _ in range(count)]


@pytest.fixture(params=FACES)
def open_face(request: pytest.FixtureRequest) -> Open:
    return FACES[request.param].open


@pytest.fixture(params=[name for name, kind in FACES.items() if not kind.has_process])
def open_here(request: pytest.FixtureRequest) -> Open:
    """Opens the faces whose runner can be reached from the test."""
    return FACES[request.param].open


@pytest.fixture(params=[name for name, kind in FACES.items() if kind.has_process])
def open_killable(request: pytest.FixtureRequest) -> Open:
    return FACES[request.param].open
