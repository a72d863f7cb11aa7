"""What is asked of an engine while it is measured (prompts and answers of one length, a seed), and when it came."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

from engine.bench.report import Report
from engine.errors import ConfigError
from engine.sampling_params import SamplingParams

_SPECIAL = 1000
"""Ids from here on are words: below lie single bytes and special tokens, after which models write no text."""


class Workload(NamedTuple):
    """Requests of one shape; each is a greedy completion that goes on past end tokens.

    Attributes:
        num_prompts: How many.
        input_len: Tokens a prompt.
        output_len: Tokens an answer.
        seed: The same seed gives the same prompts.
    """

    num_prompts: int
    input_len: int
    output_len: int
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return the prompts' token ids, words of a vocabulary of `vocab_size`."""
        draw = random.Random(self.seed)
        ids = range(_SPECIAL if vocab_size > _SPECIAL else 0, vocab_size)
        return [draw.choices(ids, k=self.input_len) for _ in range(self.num_prompts)]

    def params(self) -> SamplingParams:
        """Return what every prompt is completed with."""
        return SamplingParams(temperature=0.0, max_tokens=self.output_len, ignore_eos=True)

    def settings(self) -> dict[str, Any]:
        """Return the fields by name, for a report."""
        return self._asdict()


def check_count(flag: str, value: int) -> None:
    """Raise ConfigError, naming `flag`, unless `value` is at least 1."""
    if value < 1:
        raise ConfigError(f"{flag} must be at least 1, got {value}")


class StreamTimes:
    """When the tokens of many streams came, in seconds.

    Attributes:
        first_token_s: From asking to the first token, a stream.
        inter_token_s: Between two arrivals of a stream. One may bring several tokens to a slow reader, and over HTTP
            a token that completes no character brings none.
        per_token_s: From the first token to the last, divided by the tokens between, a stream.
        whole_s: From asking to the last token, a stream.
        num_tokens: Of all streams that were closed.
    """

    def __init__(self) -> None:
        """Start without streams."""
        self.first_token_s: list[float] = []
        self.inter_token_s: list[float] = []
        self.per_token_s: list[float] = []
        self.whole_s: list[float] = []
        self.num_tokens = 0

    def open(self, now_s: float) -> OneStream:
        """Follow a stream that is asked for now; nothing of it counts before it is closed."""
        return OneStream(self, now_s)

    def describe(self, report: Report) -> None:
        """Add the distributions to a report."""
        report.add_times("time_to_first_token", self.first_token_s)
        report.add_times("inter_token_latency", self.inter_token_s)
        report.add_times("time_per_output_token", self.per_token_s)
        report.add_times("whole_answer", self.whole_s)


class OneStream:
    """The arrivals of one stream."""

    def __init__(self, times: StreamTimes, asked_s: float) -> None:
        """Report to `times` on `close`."""
        self._times = times
        self._asked_s = asked_s
        self._arrivals_s: list[float] = []

    def add(self, now_s: float) -> None:
        """Tokens came."""
        self._arrivals_s.append(now_s)

    def close(self, num_tokens: int) -> None:
        """The stream has ended with so many tokens in all, at least one."""
        first_s, last_s = self._arrivals_s[0], self._arrivals_s[-1]
        self._times.first_token_s.append(first_s - self._asked_s)
        self._times.inter_token_s += [after - before for before, after in pairwise(self._arrivals_s)]
        if num_tokens > 1:
            self._times.per_token_s.append((last_s - first_s) / (num_tokens - 1))
        self._times.whole_s.append(last_s - self._asked_s)
        self._times.num_tokens += num_tokens
