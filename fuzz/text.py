"""Whatever tokens a model draws and in whichever parts they come, the reader gets the one text, and what it means.

::

    python -m fuzz text --minutes 10 --seed 7

A round draws token ids of one of three tokenizers (fuzz/vocabularies.py), some of them a text in tokens, with stop
strings and stop tokens, and checks:

- deltas, joined, are the text of all ids, less what the stop rule cuts off, however the ids are split, also where a
  slow reader gets several at once or the server tells in intervals; finish and stop reason are the same too;
- the parsers of calls and reasoning give the same pieces of that text as of the deltas, lose none of it, and give
  nothing that cannot be sent;
- a grammar of every kind: a token is in the mask exactly if the grammar takes it, over the whole vocabulary.
"""

from __future__ import annotations

import copy
import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.client.output_processor import RequestState
from engine.client.parsers.pieces import Content, Parser, Piece, merged
from engine.client.parsers.reasoning import Opening
from engine.client.parsers.registry import TOOL_FORMATS, ChatParser
from engine.client.tokenizer import Tokenizer
from engine.errors import InvalidGrammar
from engine.outputs import FinishReason, RequestId
from engine.protocol import EngineCoreOutput, EngineCoreRequest
from engine.sampling_params import OutputKind, SamplingParams, structured_outputs_params
from engine.structured_output.after_reasoning import behind_reasoning
from engine.structured_output.grammar import new_bitmasks
from engine.structured_output.lark import to_lark
from engine.structured_output.llguidance_backend import LLGuidanceGrammar, match
from engine.structured_output.vocabulary import Vocabulary
from fuzz.vocabularies import EOS, TOKENIZERS

CALL = '{"name": "get_weather", "arguments": {"city": "Bern", "days": [1, null]}}'
SURROGATES = [
    (r"\ud800", "{}"),
    ("f", r'"\ud83d"'),
    ("f", r'{"a": "\udead"}'),
    ("f", r'"{\"a\": \"\ud83d\ude00\ud800\"}"'),
]
"""Escapes in calls that stand for no character."""
SNIPPETS = [f"<tool_call>\n{CALL}\n</tool_call>", f"[TOOL_CALLS][{CALL}]", CALL, "<think>", "</think>", "<tool_call>"]
SNIPPETS += ["[f(x='a', y=[1])]", "The fox ", "日本", "😀", '{"', "\n\n", "[TOOL_CALLS]f{}", "é", "}", "</tool_call>"]
SNIPPETS += [f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>' for name, arguments in SURROGATES]
SNIPPETS += [f'[{{"name": "{name}", "parameters": {arguments}}}]' for name, arguments in SURROGATES]
SNIPPETS += [r"[f(x='\ud800')]", r"[f(x={'\ud83d\ude00': 1})]"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "number"}, "e": {"enum": ["a", 1, None]}},
    "required": ["name"],
}
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": "([a-zé]+ ){1,3}[0-9]{2,4}|é?"},
    "choice": {"choice": ["yes", "yes, really", "no", "né😀"]},
    "grammar": {"grammar": 'start: (WORD | "(" start ")")+\nWORD: /[a-z]{1,9}/\n%ignore / +/'},
    "structural_tag": {"structural_tag": TAG},
}


class Told(NamedTuple):
    """What a reader got of a completion."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    deltas: tuple[str, ...] = ()


class Case(NamedTuple):
    """A completion: its tokens, how it ends, and what cuts its text."""

    tokenizer: Tokenizer
    token_ids: list[int]
    finish_reason: FinishReason
    params: SamplingParams

    @classmethod
    def drawn(cls, draw: random.Random) -> Case:
        """Draw one."""
        tokenizer = TOKENIZERS[draw.choice(list(TOKENIZERS))]()
        token_ids: list[int] = []
        for _ in range(draw.randrange(1, 7)):
            if draw.random() < 0.6:
                token_ids += tokenizer.encode(draw.choice(SNIPPETS), add_special_tokens=False)
            else:
                token_ids += draw.choices(range(tokenizer.vocab_size + 3), k=draw.randrange(1, 9))
        token_ids = token_ids or [EOS]
        ends = draw.random() < 0.3
        token_ids = [i for i in token_ids if i != EOS or not ends] + [EOS] * ends
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        params = SamplingParams(
            stop=_drawn_stops(draw, text),
            include_stop_str_in_output=draw.random() < 0.3,
            skip_special_tokens=draw.random() < 0.7,
            eos_token_ids=(EOS,) if ends else (),
            stream_interval=draw.choice([1, 1, 2, 5]),
            max_tokens=None,
        )
        return cls(tokenizer, token_ids, FinishReason.STOP if ends else FinishReason.LENGTH, params)

    def expected(self) -> Told:
        """Return what the reader must get, by decoding everything at once."""
        is_hidden = self.finish_reason is FinishReason.STOP and not self.params.include_stop_str_in_output
        shown = self.token_ids[: len(self.token_ids) - is_hidden]
        text = self.tokenizer.decode(shown, skip_special_tokens=self.params.skip_special_tokens)
        ends = [(text.find(stop) + len(stop), order) for order, stop in enumerate(self.params.stop) if stop in text]
        if not ends:
            return Told(text, self.token_ids, self.finish_reason, None)
        end, order = min(ends)
        stop = self.params.stop[order]
        cut = end if self.params.include_stop_str_in_output else end - len(stop)
        return Told(text[:cut], [], FinishReason.STOP, stop)


def _drawn_stops(draw: random.Random, text: str) -> tuple[str, ...]:
    """Draw stop strings, most of them parts of `text`."""
    stops = []
    for _ in range(draw.choice([0, 0, 1, 2, 3])):
        start = draw.randrange(len(text) + 1)
        stops.append(text[start : start + draw.randrange(1, 6)] or "stop")
    return tuple(stops)


def read(case: Case, draw: random.Random) -> Told:
    """Give the tokens to a request in drawn parts, read at drawn moments; return what came out."""
    request = EngineCoreRequest(RequestId("r"), "r", [], case.params, 0.0)
    state = RequestState("r", None, [request], OutputKind.DELTA, case.tokenizer, 0.0)
    told = Told("", [], None, None)
    start = 0
    while start < len(case.token_ids) and not state.is_finished:
        stop = start + draw.choice([1, 1, 1, 2, 3, 8, 100])
        reason = case.finish_reason if stop >= len(case.token_ids) else None
        state.add(EngineCoreOutput(request.request_id, case.token_ids[start:stop], finish_reason=reason), 0.0)
        start = stop
        if draw.random() < 0.7 or state.is_finished:
            news = state.fetch()
            if news is not None:
                ids, deltas = [*told.token_ids, *news.token_ids], (*told.deltas, news.text)
                told = Told(told.text + news.text, ids, news.finish_reason, news.stop_reason, deltas)
    return told


def check_text(case: Case, draw: random.Random) -> None:
    """Check one completion, split in several ways."""
    expected = case.expected()
    first = read(case, draw)
    for told in (first, read(case, draw), read(case, random.Random(1))):
        assert told.text == expected.text, (told, expected)
        assert (told.finish_reason, told.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert told.token_ids == first.token_ids
        assert told.token_ids == case.token_ids[: len(told.token_ids)]
        if expected.token_ids:
            assert told.token_ids == expected.token_ids
        for parser in PARSERS:
            check_pieces(parser, told)


def _chat(opening: Opening, name: str) -> Parser:
    return ChatParser(opening, TOOL_FORMATS[name].make_parser(None))


PARSERS: list[Callable[[], Parser]] = [functools.partial(known.make_parser, None) for known in TOOL_FORMATS.values()]
PARSERS += [
    functools.partial(_chat, opening, name) for opening in (Opening.INSIDE, Opening.OPEN) for name in TOOL_FORMATS
]


def check_pieces(make_parser: Callable[[], Parser], told: Told) -> None:
    """Check that a parser makes of the deltas what it makes of the text, and of each character alone."""
    whole = pieces_of(make_parser(), [told.text])
    msgspec.json.encode(whole)  # as it is sent
    assert pieces_of(make_parser(), told.deltas) == whole
    assert pieces_of(make_parser(), told.text) == whole
    if not isinstance(make_parser(), ChatParser) and all(isinstance(piece, Content) for piece in whole):
        assert "".join(piece.text for piece in whole if isinstance(piece, Content)) == told.text


def pieces_of(parser: Parser, parts: Sequence[str]) -> list[Piece]:
    """Return all that `parser` gives for a text in `parts`."""
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    return merged([*pieces, *parser.finish()])


@functools.cache
def vocabulary_of(name: str) -> Vocabulary:
    """Return a tokenizer's vocabulary, with ids beyond its own as models have them."""
    tokenizer = TOKENIZERS[name]()
    return Vocabulary.of(tokenizer, tokenizer.vocab_size + 17)


def check_grammar(name: str, kind: str, draw: random.Random, num_tokens: int = 12) -> int:
    """Compare mask and acceptance of every token along a drawn text; return how many were compared.

    One text in four comes behind reasoning. None are where the tokens cannot spell such a text, which is refused.
    """
    vocabulary, asked = vocabulary_of(name), structured_outputs_params(FORMS[kind])
    params = SamplingParams(eos_token_ids=(EOS,))
    lark = to_lark(asked)
    if draw.random() < 0.25:
        lark = behind_reasoning(lark, is_begun=draw.random() < 0.5)
    try:
        grammar = LLGuidanceGrammar(match(asked, lark, vocabulary), vocabulary, params)
    except InvalidGrammar:
        assert name == "WordPiece"  # whose words stand apart
        return 0
    num_compared = 0
    for _ in range(num_tokens):
        mask = new_bitmasks(1, vocabulary.size)[0]
        grammar.fill_bitmask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        ends = {EOS} if grammar._matcher.is_accepting() else set()
        accepted = [i for i in range(vocabulary.size) if i in ends or grammar._matcher.validate_tokens([i])]
        assert allowed == accepted, (name, kind, set(allowed) ^ set(accepted))
        for token_id in {*draw.sample(range(vocabulary.size), 8), *allowed[:4], EOS}:
            assert _twin(grammar).accept_tokens([token_id]) == (token_id in allowed)
        num_compared += vocabulary.size
        choices = [token_id for token_id in allowed if token_id != EOS]
        if not choices:
            break
        assert grammar.accept_tokens([draw.choice(choices)])
    return num_compared


def _twin(grammar: LLGuidanceGrammar) -> LLGuidanceGrammar:
    twin = copy.copy(grammar)
    twin._matcher = grammar._matcher.deep_copy()
    return twin


def run(minutes: float, seed: int) -> int:
    """Play rounds until the time is over or one breaks a promise; return how many."""
    deadline = time.monotonic() + 60 * minutes
    draw = random.Random(seed)
    kinds = [(name, kind) for name in TOKENIZERS for kind in FORMS]
    num_rounds = num_compared = 0
    while time.monotonic() < deadline:
        case_seed = draw.getrandbits(64)
        try:
            own = random.Random(case_seed)
            check_text(Case.drawn(own), own)
            if num_rounds % 50 == 0:
                num_compared += check_grammar(*kinds[num_rounds // 50 % len(kinds)], own)
        except BaseException as error:
            error.add_note(f"in round {num_rounds}, seed {case_seed}")
            raise
        num_rounds += 1
        if num_rounds % 2000 == 0:
            print(f"text: {num_rounds} completions, {num_compared} tokens against masks, clean so far", flush=True)
    print(f"text: {num_rounds} completions, {num_compared} tokens against masks, clean")
    return num_rounds
