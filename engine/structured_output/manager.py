"""Grammars for one model's requests, over its vocabulary, which is loaded with the first of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import Cause, InvalidGrammar, ModelError
from engine.sampling_params import SamplingParams
from engine.structured_output.grammar import Grammar

if TYPE_CHECKING:
    from engine.structured_output.vocabulary import Vocabulary


class StructuredOutputManager:
    """Compiles what requests of one model ask for; for one thread at a time."""

    def __init__(self, model: str, vocab_size: int) -> None:
        """Serve the model in this folder, or `"null"`; nothing is loaded yet."""
        self._model = model
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None

    def compile(self, params: SamplingParams, lark: str = "") -> Grammar | Cause:
        """Compile the grammar of a request that asks for one, `lark` where that is known; or say why it is refused.

        Anew for each request: copies of a compiled grammar would share the limits of its lexer, so that one could fail
        by what another generated.
        """
        from engine.structured_output.compilation import compile_grammar, load_vocabulary  # a quarter of all imports

        try:
            if self._vocabulary is None:
                self._vocabulary = load_vocabulary(self._model, self._vocab_size)
            return compile_grammar(params, lark, self._vocabulary)
        except (InvalidGrammar, ModelError) as error:
            return refusal(str(error))


def refusal(message: str) -> Cause:
    """Return the cause of a request whose grammar cannot be had; the caller's fault."""
    return Cause(InvalidGrammar.__name__, message)
