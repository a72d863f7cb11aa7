"""Grammars for one model's requests, over its vocabulary, which is loaded with the first of them."""

from __future__ import annotations

from engine.client.tokenizer import load_tokenizer
from engine.errors import Cause, InvalidGrammar, ModelError
from engine.sampling_params import SamplingParams
from engine.structured_output.after_reasoning import GrammarAfterReasoning, GrammarOrReasoning, behind_reasoning
from engine.structured_output.grammar import Grammar
from engine.structured_output.lark import to_lark
from engine.structured_output.llguidance_backend import LLGuidanceGrammar, match
from engine.structured_output.vocabulary import Vocabulary


class StructuredOutputManager:
    """Compiles what requests of one model ask for; for one thread at a time."""

    def __init__(self, model: str, vocab_size: int) -> None:
        """Serve the model in this folder, or `"null"`; nothing is loaded yet."""
        self._model = model
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None

    def compile(self, params: SamplingParams, lark: str | None = None) -> Grammar | Cause:
        """Compile the grammar of a request that asks for one, `lark` where that is known; or say why it is refused.

        Anew for each request: copies of a compiled grammar would share the limits of its lexer, so that one could fail
        by what another generated.
        """
        asked, before = params.structured_outputs, params.reasoning
        assert asked is not None
        try:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.of(load_tokenizer(self._model), self._vocab_size)
            lark = lark or to_lark(asked)
            if before is not None and before.markers is None:
                return with_reasoning(lark, self._vocabulary, params, is_begun=before.is_begun)
            grammar = LLGuidanceGrammar(match(asked, lark, self._vocabulary), self._vocabulary, params)
        except (InvalidGrammar, ModelError) as error:
            return refusal(str(error))
        if before is None or before.markers is None:
            return grammar
        ends = (*params.eos_token_ids, *params.stop_token_ids)
        size, spaces = self._vocabulary.size, self._vocabulary.space_token_ids
        return GrammarAfterReasoning(
            grammar, before.markers, ends, size, is_begun=before.is_begun, space_token_ids=spaces
        )


def with_reasoning(lark: str, vocabulary: Vocabulary, params: SamplingParams, *, is_begun: bool) -> Grammar:
    """Compile `lark`, which follows reasoning if that `is_begun`, and else may; its markers are spelled as text.

    Raises:
        InvalidGrammar: The grammar is wrong; the caller's fault.
    """
    asked = params.structured_outputs
    assert asked is not None
    behind = behind_reasoning(lark, is_begun=is_begun)
    grammar = LLGuidanceGrammar(match(asked, behind, vocabulary), vocabulary, params)
    if is_begun:
        return grammar
    form = LLGuidanceGrammar(match(asked, lark, vocabulary), vocabulary, params)
    return GrammarOrReasoning(grammar, form, vocabulary.matchable.decode_bytes)


def refusal(message: str) -> Cause:
    """Return the cause of a request whose grammar cannot be had; the caller's fault."""
    return Cause(InvalidGrammar.__name__, message)
