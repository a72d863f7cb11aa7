"""A grammar that holds for what follows the reasoning.

Where its markers are ordinary text it is a grammar for all of it, beside one of a text without reasoning. Where they
are tokens of their own, which may be special and so add nothing to a text, the grammar is told of none of them::

    BEFORE ──start token──▶ INSIDE ──end token──▶ AFTER: the grammar holds
       └──any token of the grammar───────────────▶ AFTER
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Sequence

import numpy as np

from engine.client.parsers.reasoning import END, START
from engine.outputs import GrammarMasks
from engine.structured_output.grammar import BITS_A_WORD, Grammar
from engine.structured_output.vocabulary import pack_bits

SPACE = r" \t\n\r"
MAX_SPACE = 16
"""White space that may stand between reasoning and the form: characters, or tokens of nothing else."""


def behind_reasoning(lark: str, *, is_begun: bool) -> str:
    """Return a grammar of reasoning, whose markers are text, and then of `lark`; without the first one if `is_begun`.

    White space around the markers belongs to neither.
    """
    end = re.sub("(?=/)", r"\\", END)
    start = "thought space? @form" if is_begun else f"space? {json.dumps(START)} thought space? @form"
    lines = [f"start: {start}", rf"thought[lazy]: /(?s:.*){end}/", rf"space: /[{SPACE}]{{1,{MAX_SPACE}}}/"]
    outer = "\n".join([*lines, '%llguidance {"no_forcing": true}'])
    return json.dumps({"grammars": [{"lark_grammar": outer}, {"name": "form", "lark_grammar": lark}]})


class GrammarOrReasoning:
    """One request's grammar, which reasoning, whose markers are text, may precede; see `Grammar`.

    What has begun like reasoning is nothing else: a form with free text in it would hold inside of the reasoning too.
    """

    def __init__(self, reasoning: Grammar, form: Grammar, spell: Callable[[list[int]], bytes]) -> None:
        """Own a grammar of reasoning and then the form, and one of the form; `spell` gives the text of tokens."""
        self._possible = [reasoning, form]
        self._spell = spell
        self._text = b""

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        return any(grammar.is_finished for grammar in self._possible)

    @property
    def failure(self) -> str | None:
        """Why it can allow nothing more although the text is not complete; None while it works."""
        failures = [grammar.failure for grammar in self._possible]
        return None if None in failures else failures[0]

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over `token_ids`; from where the text cannot be both, only what it is goes on."""
        for token_id in token_ids:
            if len(self._possible) > 1:
                self._text += self._spell([token_id])
                if self._text.lstrip().startswith(START.encode()):
                    del self._possible[1]
            going_on = [grammar for grammar in self._possible if grammar.accept_tokens([token_id])]
            if not going_on:
                return False
            self._possible = going_on
        return True

    def fill_bitmask(self, bitmask: GrammarMasks) -> None:
        """Set the bit of each token that may come next."""
        for grammar in self._possible:
            mask = np.zeros_like(bitmask)
            grammar.fill_bitmask(mask)
            np.bitwise_or(bitmask, mask, out=bitmask)


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    AFTER = enum.auto()


class GrammarAfterReasoning:
    """One request's grammar, which is told of nothing before the reasoning's end; see `Grammar`.

    Inside of the reasoning all tokens are allowed but ends: the text would lack its form.
    """

    def __init__(
        self,
        grammar: Grammar,
        markers: tuple[int, int],
        end_token_ids: Sequence[int],
        vocab_size: int,
        *,
        is_begun: bool,
        space_token_ids: Sequence[int] = (),
    ) -> None:
        """Own `grammar`; `end_token_ids` are those that would end the request, `space_token_ids` white space alone.

        White space behind the reasoning belongs to neither, unless the grammar allows it.
        """
        self._grammar = grammar
        self._start, self._end = markers
        self._state = _State.INSIDE if is_begun else _State.BEFORE
        self._space = frozenset(space_token_ids)
        self._space_bits = pack_bits(vocab_size, space_token_ids)
        self._num_spaces_left = 0
        self._start_bits = pack_bits(vocab_size, [self._start])
        self._no_end_bits = np.bitwise_not(pack_bits(vocab_size, end_token_ids))

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        return self._state is _State.AFTER and self._grammar.is_finished

    @property
    def failure(self) -> str | None:
        """Why it can allow nothing more although the text is not complete; None while it works."""
        return self._grammar.failure

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over `token_ids`: the grammar is told those that follow the reasoning."""
        for index, token_id in enumerate(token_ids):
            match self._state:
                case _State.BEFORE if token_id == self._start:
                    self._state = _State.INSIDE
                case _State.INSIDE:
                    if token_id == self._end:
                        self._state, self._num_spaces_left = _State.AFTER, MAX_SPACE
                case _ if self._num_spaces_left and token_id in self._space and not self._is_of_grammar(token_id):
                    self._num_spaces_left -= 1
                case _:
                    self._state, self._num_spaces_left = _State.AFTER, 0
                    return self._grammar.accept_tokens(token_ids[index:])
        return True

    def fill_bitmask(self, bitmask: GrammarMasks) -> None:
        """Set the bit of each token that may come next."""
        if self._state is _State.INSIDE:
            bitmask[:] = self._no_end_bits
            return
        self._grammar.fill_bitmask(bitmask)
        if self._state is _State.BEFORE:
            np.bitwise_or(bitmask, self._start_bits, out=bitmask)
        elif self._num_spaces_left:
            np.bitwise_or(bitmask, self._space_bits, out=bitmask)

    def _is_of_grammar(self, token_id: int) -> bool:
        mask = np.zeros_like(self._space_bits)
        self._grammar.fill_bitmask(mask)
        return bool(mask[token_id // BITS_A_WORD] >> token_id % BITS_A_WORD & 1)
