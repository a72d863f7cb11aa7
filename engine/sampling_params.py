"""One request's sampling wishes: validated on construction, frozen, the same in Python, over HTTP and on the wire.

Every field is obeyed or refused by name. What only the input processor can know (the model's EOS ids, a seed drawn
for a request without one, the default of `max_tokens`) is resolved into a copy before the request leaves the client.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from engine.parameter_checks import check_count, check_int, check_number, check_text, freeze_list, shown
from engine.structured_output.params import MAX_GRAMMAR_CHARS as MAX_GRAMMAR_CHARS
from engine.structured_output.params import StructuredOutputsParams as StructuredOutputsParams  # part of this interface
from engine.structured_output.params import structured_outputs_params as structured_outputs_params

MAX_N = 128
"""Most completions one request may ask for."""
MAX_STOP_STRINGS = 64
"""Most stop strings one request may carry."""
MAX_STOP_CHARS = 1024
"""Longest stop string: text that may become one is held back and searched at each token."""
MAX_STOP_TOKEN_IDS = 128
"""Most stop token ids one request may carry: each is compared with each token."""
MAX_PATTERN_SIZE = 128
"""Longest repeated pattern looked for: each size is tried at each token."""
MAX_PATTERN_COUNT = 1024
"""Most repetitions that may be asked for."""
MAX_LOGIT_BIAS = 1024
"""Most token ids that may have a bias."""
MAX_ALLOWED_TOKEN_IDS = 16_384
"""Most token ids that `allowed_token_ids` may list: they are laid out anew at each token."""
MAX_BAD_WORDS = 128
"""Most words one request may forbid: each is compared with the end of the output at each token."""
MAX_BAD_WORD_CHARS = 256
"""Longest word to forbid."""
MAX_LOGPROBS = 20
"""Most likeliest tokens that may be told beside each token."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Most token ids whose logprobs may be told beside each token."""
MAX_STREAM_INTERVAL = 65_536
"""Most tokens that one output of a stream may be made to wait for."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Beyond these, logits of the usual size would leave what float32 tells apart."""
MAX_TOP_K = 2**31 - 1
"""No vocabulary is larger; what is sent must fit a word."""
GREEDY_BELOW = 1e-5
"""Temperatures under this take the arg max; no scaling is applied."""


_NOTHING: dict[str, Any] = {"stop": (), "stop_token_ids": (), "bad_words": (), "logit_bias": {}}
"""Lists and maps that None stands for, empty."""
_SWITCHES = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "skip_reading_prefix_cache",
    "detokenize",
)


class OutputKind(enum.StrEnum):
    """What each output of a stream holds: what is new, all so far, or only the whole at the end."""

    DELTA = "delta"
    CUMULATIVE = "cumulative"
    FINAL_ONLY = "final_only"


class ReasoningBefore(msgspec.Struct, frozen=True):
    """The reasoning before a text that must have a form.

    Attributes:
        is_begun: Whether the prompt has begun it; else the text may begin with it.
        markers: The token ids of its start and end; None where they are spelled like any other text.
    """

    is_begun: bool
    markers: tuple[int, int] | None


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When output that goes round in circles is ended, with finish reason `repetition`.

    Attributes:
        max_pattern_size: Longest pattern looked for, in tokens; 0 for none.
        min_pattern_size: Shortest pattern looked for.
        min_count: Times in a row that a pattern must have come.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 2

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: A value is of the wrong type or out of its range; the caller's fault.
        """
        try:
            check_int("max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
            check_int("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
            check_int("min_count", self.min_count, 2, MAX_PATTERN_COUNT)
        except InvalidRequest as error:
            raise InvalidRequest(f"repetition_detection: {error}", param="repetition_detection") from None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to draw tokens and when to stop.

    Attributes:
        n: Completions to draw for the prompt, 1 to 128. Child i of a seeded request uses seed + i.
        temperature: 0 to 2; 0 takes the most likely token.
        top_k: Keep this many most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most likely tokens with at least this probability; in (0, 1].
        min_p: Drop tokens less likely than this share of the most likely one; in [0, 1].
        presence_penalty: Taken off the logit of every token that the output holds; -2 to 2.
        frequency_penalty: Taken off a token's logit for each time that the output holds it; -2 to 2.
        repetition_penalty: Divides the logit of every token in prompt or output, or multiplies it where it is negative;
            0.01 to 100, 1 for none.
        logit_bias: Token id → what is added to its logit, -100 to 100.
        allowed_token_ids: All other tokens are forbidden; None allows all.
        bad_words: Words that must not come in the output, at its start or after a space.
        logprobs: Tell each token's logprob and rank, and the logprobs of this many likeliest ones, 0 to 20; None for
            none. They are the model's own, before every parameter here.
        logprob_token_ids: Tell the logprobs of these tokens, at most 128, in place of the likeliest ones.
        prompt_logprobs: Likewise for the prompt's tokens but the first; nothing cached is then read.
        seed: Draws depend only on (seed, position); None lets the client draw a seed, and so does -1, as in
            vLLM.
        max_tokens: Most tokens to generate, at least 1; None means up to the context's end.
        min_tokens: No end (EOS, stop token or stop string) before this many tokens.
        stop: Strings that end the text.
        stop_token_ids: Token ids that end the text.
        structured_outputs: The form the text must have, see `StructuredOutputsParams`; a complete text that nothing can
            follow ends the request with reason stop, also below `min_tokens` and with `ignore_eos`.
        repetition_detection: End output that goes round in circles; see `RepetitionDetection`.
        truncate_prompt_tokens: Keep only this many last tokens of the prompt; -1 keeps as many as the context holds
            beside `max_tokens`. None refuses a prompt that is too long.
        skip_reading_prefix_cache: Compute the whole prompt, whatever is cached; what is computed can still be hit.
        ignore_eos: Go on past the end-of-sequence token.
        include_stop_str_in_output: Keep the stop string or stop token in the text.
        skip_special_tokens: Leave special tokens out of the text.
        detokenize: Make text of the tokens; without, there is none, and no stop string can end it.
        extra_args: For logits processors of the program, see `engine.LogitsProcessor`; an object of JSON's own types.
        stream_interval: Tell news only with this many new tokens, 1 to 65,536; the first and the last token are told at
            once. The server's --stream-interval is the least; None takes that.
        output_kind: See `OutputKind`; None takes the call's default.
        eos_token_ids: The model's end tokens; resolved by the input processor, never by users.
        bad_words_token_ids: Each spelling of a bad word in tokens; likewise.
        reasoning: What comes before the text whose form is asked for; likewise.
        shown_token_ids: Special tokens that are left in the text all the same, for who parses it; set by the server.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetection | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool = False
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    extra_args: dict[str, Any] | None = None
    stream_interval: int | None = None
    output_kind: OutputKind | None = None
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    reasoning: ReasoningBefore | None = None
    shown_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: A value is of the wrong type or out of its range; the caller's fault.
        """
        self._take_vllms_words()
        stop: Any = self.stop
        check_count("stop", [] if isinstance(stop, str) else stop, MAX_STOP_STRINGS)
        freeze_list(self, "stop", (stop,) if isinstance(stop, str) else stop, str)
        check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        freeze_list(self, "stop_token_ids", self.stop_token_ids, int)
        freeze_list(self, "eos_token_ids", self.eos_token_ids, int)
        check_int("n", self.n, 1, MAX_N)
        check_number("temperature", self.temperature, 0.0, 2.0)
        check_int("top_k", self.top_k, -1, MAX_TOP_K)
        check_number("top_p", self.top_p, 0.0, 1.0, is_above=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        msgspec.structs.force_setattr(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._check_allowed_token_ids(self.allowed_token_ids)
        self._check_bad_words(self.bad_words)
        self._check_logprobs()
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None)
        check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens, which is {shown(self.max_tokens)}"
            raise InvalidRequest(f"min_tokens must be {limit}, got {shown(self.min_tokens)}", param="min_tokens")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {shown(getattr(self, name))}", param=name)
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InvalidRequest(f"extra_args must be an object, got {shown(self.extra_args)}", param="extra_args")
        if self.stream_interval is not None:
            check_int("stream_interval", self.stream_interval, 1, MAX_STREAM_INTERVAL)
        if self.truncate_prompt_tokens not in (None, -1):
            _check_truncation(self.truncate_prompt_tokens)
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop ends a text, and detokenize is false: there is none", param="stop")
        for text in self.stop:
            _check_stop_string(text)
        detection: Any = self.repetition_detection
        if detection is not None and not isinstance(detection, RepetitionDetection):
            msgspec.structs.force_setattr(self, "repetition_detection", _repetition_detection(detection))
        if self.structured_outputs is not None:
            msgspec.structs.force_setattr(
                self, "structured_outputs", structured_outputs_params(self.structured_outputs)
            )
        if self.output_kind is not None:
            msgspec.structs.force_setattr(self, "output_kind", _output_kind(self.output_kind))

    def _take_vllms_words(self) -> None:
        """Read None as vLLM's users write it for nothing, and True for one logprob."""
        for name in _NOTHING:
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, _NOTHING[name])
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                msgspec.structs.force_setattr(self, name, 1)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        """Whether tokens are made less or more likely for having come before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def reads_tokens(self) -> bool:
        """Whether a draw needs the tokens before it."""
        return self.penalises or bool(self.bad_words_token_ids)

    def _check_allowed_token_ids(self, token_ids: Any) -> None:
        check_count("allowed_token_ids", token_ids, MAX_ALLOWED_TOKEN_IDS)
        freeze_list(self, "allowed_token_ids", token_ids, int)
        if not self.allowed_token_ids:
            message = "allowed_token_ids must hold at least one token id, got none; leave it out to allow all"
            raise InvalidRequest(message, param="allowed_token_ids")

    def _check_logprobs(self) -> None:
        """Check what is told beside tokens; token ids to tell decide how many logprobs there are."""
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.logprob_token_ids is None:
            if self.logprobs is not None:
                check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
            return
        check_count("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        freeze_list(self, "logprob_token_ids", self.logprob_token_ids, int)
        num_ids = len(self.logprob_token_ids)
        if not num_ids:
            message = "logprob_token_ids must hold at least one token id, got none; leave it out for the likeliest"
            raise InvalidRequest(message, param="logprob_token_ids")
        if self.logprobs is None:
            msgspec.structs.force_setattr(self, "logprobs", num_ids)
        if type(self.logprobs) is not int or self.logprobs != num_ids:
            message = f"logprobs must be the number of logprob_token_ids, {num_ids}, got {shown(self.logprobs)}: leave "
            raise InvalidRequest(f"{message}it out", param="logprobs")

    def _check_bad_words(self, words: Any) -> None:
        check_count("bad_words", words, MAX_BAD_WORDS)
        freeze_list(self, "bad_words", words, str)
        for word in self.bad_words:
            if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
                shown = f"a word of {len(word)} characters" if word.strip() else repr(word)
                raise InvalidRequest(
                    f"bad_words must hold words of 1 to {MAX_BAD_WORD_CHARS} characters, not all of them spaces, "
                    f"got {shown}",
                    param="bad_words",
                )
            check_text("bad_words", word)


def _check_truncation(num_tokens: Any) -> None:
    if type(num_tokens) is int and num_tokens < 1:
        message = f"truncate_prompt_tokens must be -1, for as many as fit, or at least 1, got {shown(num_tokens)}"
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    check_int("truncate_prompt_tokens", num_tokens, 1, None)


def _check_stop_string(text: str) -> None:
    if not text:
        raise InvalidRequest("stop must not hold an empty string: it would end every text at once", param="stop")
    if len(text) > MAX_STOP_CHARS:
        raise InvalidRequest(
            f"a stop string may have at most {MAX_STOP_CHARS} characters, got {len(text)}", param="stop"
        )
    check_text("stop", text)


def _repetition_detection(value: Any) -> RepetitionDetection:
    known = RepetitionDetection.__struct_fields__
    if not isinstance(value, dict) or not value.keys() <= set(known):
        message = f"repetition_detection must be an object of {', '.join(known)}, got {shown(value)}"
        raise InvalidRequest(message, param="repetition_detection")
    return RepetitionDetection(**value)


def _logit_bias(given: Any) -> dict[int, float]:
    """Return a checked copy of a map of token ids, which are strings in JSON."""
    if not isinstance(given, dict):
        raise InvalidRequest(
            f"logit_bias must be a map of token ids to numbers, got {shown(given)}", param="logit_bias"
        )
    if len(given) > MAX_LOGIT_BIAS:
        message = f"logit_bias may hold at most {MAX_LOGIT_BIAS} token ids, got {len(given)}"
        raise InvalidRequest(message, param="logit_bias")
    checked = {}
    for key, bias in given.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token_id: Any = int(key) if is_digits else key
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**31:
            message = f"logit_bias must have token ids from 0 to {2**31 - 1} as keys, got {shown(key)}"
            raise InvalidRequest(message, param="logit_bias")
        try:
            check_number(f"logit_bias of token {token_id}", bias, -100.0, 100.0)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param="logit_bias") from None
        checked[token_id] = float(bias)
    return checked


def _output_kind(value: Any) -> OutputKind:
    try:
        return OutputKind(value)
    except ValueError:
        allowed = ", ".join(OutputKind)
        raise InvalidRequest(f"output_kind must be one of {allowed}, got {shown(value)}", param="output_kind") from None
