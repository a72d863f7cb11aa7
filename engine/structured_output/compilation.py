"""What compiles one grammar over a vocabulary; imports the libraries that engines without grammars do not need."""

from __future__ import annotations

from engine.client.tokenizer import load_tokenizer
from engine.sampling_params import SamplingParams
from engine.structured_output.after_reasoning import GrammarAfterReasoning, GrammarOrReasoning, behind_reasoning
from engine.structured_output.grammar import Grammar
from engine.structured_output.lark import to_lark
from engine.structured_output.llguidance_backend import LLGuidanceGrammar, match
from engine.structured_output.vocabulary import Vocabulary


def load_vocabulary(model: str, size: int) -> Vocabulary:
    """Return the vocabulary of `size` tokens of the model in this folder, or `"null"`.

    Raises:
        ModelError: Its tokenizer cannot be had, or says of no token what it adds to a text.
    """
    return Vocabulary.of(load_tokenizer(model), size)


def compile_grammar(params: SamplingParams, lark: str, vocabulary: Vocabulary) -> Grammar:
    """Compile what `params` ask for, `lark` where that is known, behind the reasoning that may come before it.

    Raises:
        InvalidGrammar: The grammar is wrong; the caller's fault.
    """
    asked, before = params.structured_outputs, params.reasoning
    assert asked is not None
    lark = lark or to_lark(asked)
    if before is not None and before.markers is None:
        return with_reasoning(lark, vocabulary, params, is_begun=before.is_begun)
    grammar = LLGuidanceGrammar(match(asked, lark, vocabulary), vocabulary, params)
    if before is None or before.markers is None:
        return grammar
    ends = (*params.eos_token_ids, *params.stop_token_ids)
    size, spaces = vocabulary.size, vocabulary.space_token_ids
    return GrammarAfterReasoning(grammar, before.markers, ends, size, is_begun=before.is_begun, space_token_ids=spaces)


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
