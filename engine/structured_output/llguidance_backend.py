"""Grammars compiled by llguidance, whose masks are computed lazily, each within fixed limits of work."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from engine.errors import InvalidGrammar
from engine.outputs import GrammarMasks
from engine.sampling_params import SamplingParams
from engine.structured_output.grammar import new_bitmasks
from engine.structured_output.lark import whose_schema
from engine.structured_output.params import StructuredOutputsParams
from engine.structured_output.vocabulary import Vocabulary, pack_bits

MAX_ERROR_CHARS = 400
"""Of a compiler's message that is told."""
_ADVICE = {
    "Unimplemented keys": "leave them out, or say it in another way",
    "Unknown format": "leave it out, or give a pattern",
    "oneOf constraints": "it is set in the schema's x-guidance; anyOf says the same if its schemas exclude each other",
    "is not present in a registry": "put what is referred to under $defs",
    "are not disjoint": "let each name match one of them alone",
    "schema too large": "make it simpler",
}
"""What to do about faults that the compiler tells in these words."""
_PLACE = re.compile(r"^(?:at )?(\d+)\(\d+\): (?:failed to compile JSON schema: )?")
"""Of a fault in a text that the user did not write."""


def limits(*, is_trial: bool = False) -> LLParserLimits:
    """Return what one grammar may take: of memory in all, and of work for each mask.

    A usual mask over 49,152 tokens takes a tenth of a millisecond, and one that comes near the limits some 10. It is
    rules that read the same text in very many ways which do: `step_max_items` is for them. It counts what is found
    and not the search: with few letters, as in `e: e e | /a/`, a hundred tokens would come to 200 ms; so a trial
    refuses what takes ever longer.

    In a trial it is half of that, so that one which reaches a limit is refused rather than ended midway. A trial is
    over single bytes, whose masks take less: over longer tokens it may happen all the same.
    """
    part = 2 if is_trial else 1
    return LLParserLimits(
        max_items_in_row=5000 // part,
        initial_lexer_fuel=1_000_000 // part,
        step_lexer_fuel=100_000 // part,
        step_max_items=5000 // part,
        max_lexer_states=50_000 // part,
        max_grammar_size=250_000 // part,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


class LLGuidanceGrammar:
    """One request's grammar; see `Grammar`.

    Where the text may end, the request's ends are allowed: its stop tokens, and EOS unless that is ignored. Elsewhere
    no special token is, and of the ends only a stop token that is ordinary text which the form has there.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, params: SamplingParams) -> None:
        """Own `matcher`."""
        self._matcher = matcher
        self._ordinary = vocabulary.ordinary
        self._scratch_size = vocabulary.size + 1
        self._ends = frozenset(params.stop_token_ids + (() if params.ignore_eos else params.eos_token_ids))
        self._end_bits = pack_bits(vocabulary.size, sorted(self._ends))

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def failure(self) -> str | None:
        """Why it can allow nothing more although the text is not complete; None while it works."""
        return message_of(self._matcher) if self._matcher.is_error() else None

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance over `token_ids`; an end is accepted where the text may end, and changes nothing."""
        for token_id in token_ids:
            if token_id in self._ends and not self._matcher.validate_tokens([token_id]):
                if not self._matcher.is_accepting():
                    return False
            elif not self._matcher.consume_token(token_id):
                return False
        return True

    def fill_bitmask(self, bitmask: GrammarMasks) -> None:
        """Set the bit of each token that may come next; none where the grammar failed."""
        mask = compute_mask(self._matcher, self._scratch_size)
        if mask is None:
            return
        np.bitwise_and(mask[: len(bitmask)], self._ordinary, out=bitmask)
        if self._matcher.is_accepting():
            np.bitwise_or(bitmask, self._end_bits, out=bitmask)


def compute_mask(matcher: LLMatcher, size: int) -> GrammarMasks | None:
    """Return the mask over `size` tokens, the library's own end token included; None where the matcher failed."""
    mask = new_bitmasks(1, size)[0]
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return None if matcher.is_error() else mask


def match(params: StructuredOutputsParams, lark: str, vocabulary: Vocabulary, *, is_trial: bool = False) -> LLMatcher:
    """Return a matcher of `lark`, the grammar of `params`, that allows at least one token.

    Raises:
        InvalidGrammar: The grammar is wrong, too large, or allows no text; the caller's fault.
    """
    matcher = LLMatcher(vocabulary.matchable, lark, log_level=0, limits=limits(is_trial=is_trial))
    if matcher.is_error():
        fault = message_of(matcher)
        place = _PLACE.match(fault)
        line = "".join(lark.split("\n")[int(place[1]) - 1 :][:1]) if place else ""
        whose = whose_schema(line, 0, len(line))
        if params.kind != "grammar" or whose:
            fault = (f"{whose}: " if whose else "") + _PLACE.sub("", fault)
        fault = "; ".join([fault, *(advice for words, advice in _ADVICE.items() if words in fault)])
        raise InvalidGrammar(f"{params.kind}: {fault}")
    mask = compute_mask(matcher, vocabulary.size + 1)
    fault = message_of(matcher) if mask is None else ""
    if "error: " in fault:  # the lexer or the parser reached a limit; else there was nothing to allow
        raise InvalidGrammar(f"{params.kind}: {fault}: make it simpler")
    if mask is None or not (mask[: len(vocabulary.ordinary)] & vocabulary.ordinary).any():
        text = "only the empty text" if matcher.is_accepting() else "no text that the model's tokens can spell"
        raise InvalidGrammar(f"{params.kind} allows {text}")
    return matcher


def message_of(matcher: LLMatcher) -> str:
    """Return what is wrong with a matcher that failed, without the source text around the fault."""
    told = re.split(r"\n\s*\d+ \| |\n<", matcher.get_error())[0]
    return " ".join(told.split())[:MAX_ERROR_CHARS]
