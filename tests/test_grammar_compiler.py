"""When grammars are tried and compiled, by a clock of the tests: a trial takes its processor time, or a multiple."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from engine.config import EngineConfig
from engine.errors import Cause
from engine.grammar_compiler import (
    BURST_S,
    MASK_S,
    MAX_START_S,
    STARTED_PART,
    CompiledFor,
    GrammarCompiler,
    _Budget,
    _TrialLane,
    _Wanted,
    time_for,
)
from engine.grammar_trial_frames import Answer
from engine.outputs import RequestId
from engine.sampling_params import SamplingParams
from engine.structured_output.params import StructuredOutputsParams
from web.errors import GenerationFailed

HOSTILE_S, HEAVY_S, LARGE_S, USUAL_S = 9.0, 0.045, 0.02, 0.006
START_S = 0.3
"""What the first process takes to start."""


class Timed:
    """A compiler whose trials and compiles take the time that a form's text says, and when each answer came."""

    def __init__(self, *, slowness: float = 1.0, start_s: float = START_S) -> None:
        core: Any = SimpleNamespace(capacity=SimpleNamespace(vocab_size=256), awaits_grammar=self._awaits)
        self.compiler = GrammarCompiler(EngineConfig(model="null"), core, self._take)
        self.slowness = slowness
        self.start_s = start_s
        self.tried: list[str] = []
        self.compiled: list[str] = []
        self.ended: set[str] = set()
        self.answers: dict[str, tuple[float, str]] = {}
        self._asked_s: dict[str, float] = {}
        self._has_started = False

    def ask(self, name: str, cost_s: float, client: str | None = None) -> None:
        """Ask, under a name of its own, for a form that costs so much."""
        self._asked_s[name] = trio.current_time()
        params = SamplingParams(structured_outputs={"regex": f"{name.split('#')[0]}:{cost_s}"})  # type: ignore[arg-type]
        self.compiler.want(RequestId(name), params, client)

    def names(self, says: str) -> list[str]:
        """Return whose answer was such a one, in their order."""
        return [name for name, (_, told) in self.answers.items() if told == says]

    def waits_s(self, names: Iterable[str] | None = None) -> list[float]:
        """Return how long each waited."""
        return [self.answers[name][0] - self._asked_s[name] for name in names or self.answers]

    def _awaits(self, request_id: RequestId) -> bool:
        return request_id not in self.answers and request_id not in self.ended

    def _take(self, found: CompiledFor) -> None:
        assert found.request_id not in self.answers
        told = found.grammar.type if isinstance(found.grammar, Cause) else "compiled"
        self.answers[found.request_id] = (trio.current_time(), told)

    async def try_out(
        self, lane: _TrialLane, stack: AsyncExitStack, index: int, asked: StructuredOutputsParams
    ) -> Answer:
        """Take the form's time, at most the share of the trial."""
        if not self._has_started:
            self._has_started = True
            await trio.sleep(self.start_s)
        self.tried.append((asked.regex or "").split(":")[0])
        cost_s = float((asked.regex or "").split(":")[1])
        share_s = min(lane.shares_s[index], time_for(asked, EngineConfig(model="null").grammar_compile_time))
        await trio.sleep(min(cost_s, share_s) * self.slowness)
        if cost_s <= share_s:
            return Answer(lark=str(cost_s), within_s=share_s)
        return Answer(refusal="takes too long", takes_longer=True, within_s=share_s)

    async def start(self, lane: _TrialLane, stack: AsyncExitStack) -> None:
        """Start nothing; the first trial takes the time for it."""

    async def compile(self, compiler: GrammarCompiler, wanted: _Wanted) -> None:
        """Take the form's time."""
        self.compiled.append(wanted.request_id)
        await trio.sleep(float(wanted.lark))
        compiler._deliver(CompiledFor(wanted.request_id, None))  # type: ignore[arg-type]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @asynccontextmanager
    async def open_timed(**settings: Any) -> AsyncIterator[Timed]:
        timed = Timed(**settings)
        monkeypatch.setattr(_TrialLane, "start", lambda *arguments: timed.start(*arguments))
        monkeypatch.setattr(_TrialLane, "try_out", lambda *arguments: timed.try_out(*arguments))
        monkeypatch.setattr(GrammarCompiler, "_compile", lambda *arguments: timed.compile(*arguments))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timed.compiler.run)
            yield timed
            nursery.cancel_scope.cancel()

    return open_timed


@pytest.mark.parametrize("is_cold", [True, False])
@pytest.mark.parametrize("slowness", [1.0, 8.0])
async def test_of_many_hostile_forms_at_once_each_is_answered_within_a_second_and_honest_ones_pass(
    opened: Callable[..., Any], autojump_clock: trio.testing.MockClock, slowness: float, is_cold: bool
) -> None:
    async with opened(slowness=slowness) as timed:
        if not is_cold:
            timed.ask("first", USUAL_S)
            await trio.sleep(60)
        for index in range(16):
            timed.ask(f"hostile {index}", HOSTILE_S)
        timed.ask("usual", USUAL_S)
        timed.ask("large", LARGE_S)
        await trio.sleep(60)
        refused, late = timed.names("InvalidGrammar"), timed.names("GrammarTimeout")
        assert {f"hostile {index}" for index in range(16)} <= {*refused, *late}
        assert max(timed.waits_s()) < 1
        if slowness == 1:
            assert len(refused) >= (8 if is_cold else 14)
            assert set(timed.names("compiled")) >= ({"usual"} if is_cold else {"usual", "large"})


async def test_who_asks_again_for_what_was_tried_to_its_end_is_told_at_once(
    opened: Callable[..., Any], autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(slowness=40) as timed:
        timed.ask("a", HOSTILE_S)
        await trio.sleep(60)
        assert timed.answers["a"][1] == "GrammarTimeout"
        timed.ask("a#again", HOSTILE_S)
        assert timed.answers["a#again"][1] == "InvalidGrammar"


async def test_who_asks_for_what_another_asked_for_earlier_has_all_of_its_own_time(
    opened: Callable[..., Any], autojump_clock: trio.testing.MockClock
) -> None:
    async with opened() as timed:
        timed.ask("first", USUAL_S)
        await trio.sleep(60)
        timed.slowness = 60
        timed.ask("form#1", LARGE_S)
        await trio.sleep(0.5)
        timed.ask("form#2", LARGE_S)
        await trio.sleep(60)
        assert timed.waits_s(["form#1", "form#2"]) == pytest.approx([0.8, 0.8])
        assert timed.names("GrammarTimeout") == ["form#1", "form#2"]


async def test_what_was_tried_quickly_is_compiled_before_what_took_long(
    opened: Callable[..., Any], autojump_clock: trio.testing.MockClock
) -> None:
    async with opened() as timed:
        for name, cost_s in {"heavy#0": HEAVY_S, "usual#0": USUAL_S}.items():
            timed.ask(name, cost_s)
        await trio.sleep(60)
        for index in range(1, 9):
            timed.ask(f"heavy#{index}", HEAVY_S)
        timed.ask("usual#1", USUAL_S)
        await trio.sleep(60)
        assert timed.waits_s(["usual#1"])[0] <= HEAVY_S + USUAL_S
        assert len(timed.names("compiled")) == 11


async def test_a_refusal_for_want_of_time_may_be_tried_again(
    opened: Callable[..., Any], autojump_clock: trio.testing.MockClock
) -> None:
    causes: list[Cause] = []
    async with opened(slowness=100) as timed:
        timed.compiler._deliver = lambda found: causes.extend([found.grammar] if found.grammar else [])
        timed.ask("first", USUAL_S)
        timed.ask("late", USUAL_S)
        await trio.sleep(2)
    (cause,) = causes
    assert "--grammar-answer-time 0.8 seconds" in cause.message
    assert "try again" in cause.message
    assert GenerationFailed(cause).status_hint == 503


async def test_who_comes_first_waits_but_so_long_for_a_process_that_never_starts(
    opened: Callable[..., Any], autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(start_s=100) as timed:
        await trio.sleep(60)
        timed.ask("first", USUAL_S)
        await trio.sleep(5)
        answer_s = EngineConfig(model="null").grammar_answer_time
        assert timed.waits_s(["first"]) == pytest.approx([MAX_START_S + STARTED_PART * answer_s])
        assert timed.names("GrammarTimeout") == ["first"]


async def test_nothing_is_tried_for_requests_that_have_ended_and_nobody_waits_behind_them(
    opened: Callable[..., Any], autojump_clock: trio.testing.MockClock
) -> None:
    async with opened() as timed:
        timed.ask("first", USUAL_S)
        await trio.sleep(60)
        for index in range(8):
            timed.ask(f"ended {index}", HOSTILE_S)
            timed.ended.add(f"ended {index}")
        timed.ask("shared#ended", USUAL_S)
        timed.ended.add("shared#ended")
        timed.ask("shared#waits", USUAL_S)
        await trio.sleep(60)
        assert timed.tried == ["first", "shared"]
        assert timed.waits_s(["shared#waits"]) == pytest.approx([2 * USUAL_S])


async def test_nothing_is_compiled_for_requests_that_have_ended_since_it_was_tried(
    opened: Callable[..., Any], autojump_clock: trio.testing.MockClock
) -> None:
    async with opened() as timed:
        timed.ask("form#1", USUAL_S)
        await trio.sleep(60)
        for index in range(2, 10):
            timed.ask(f"form#{index}", USUAL_S)
        timed.ended |= {f"form#{index}" for index in range(2, 9)}
        await trio.sleep(60)
        assert timed.compiled == ["form#1", "form#9"]
        assert timed.waits_s(["form#9"]) == pytest.approx([USUAL_S])


async def test_what_was_asked_for_last_stays_known(
    opened: Callable[..., Any], autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.grammar_compiler.MAX_KNOWN", 2)
    async with opened() as timed:
        for name in ("a", "b", "a#again", "c", "a#last", "b#last"):
            timed.ask(name, USUAL_S)
            await trio.sleep(60)
        assert timed.tried == ["a", "b", "c", "b"]


def test_masks_that_take_no_more_than_they_may_have_their_time_for_ever() -> None:
    told: list[str] = []
    budget = _Budget(lambda: told.append("too much"))
    for _ in range(100_000):
        budget.tell_mask(0.9 * MASK_S)
        budget.tell_accepted(0.09 * MASK_S, 1)
    for _ in range(3):
        budget.tell_mask(BURST_S / 4)
    assert not told


def test_masks_that_take_more_are_told_of_once_and_cheap_ones_before_them_buy_nothing() -> None:
    told: list[str] = []
    budget = _Budget(lambda: told.append("too much"))
    for _ in range(100_000):
        budget.tell_mask(0)
    num_steps = 0
    while not told:
        budget.tell_mask(0.1)
        num_steps += 1
    assert num_steps == 6
    budget.tell_mask(0.1)
    budget.tell_accepted(0.1, 1)
    assert told == ["too much"]
