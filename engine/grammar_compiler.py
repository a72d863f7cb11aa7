"""Grammars of a served engine, compiled beside its steps; what is new is tried in a process of its own before.

::

    step task ──want──▶ quick trials ──▶ a thread of this process ──deliver──▶ step task
                  │           └─what takes longer─▶ slow trial ─▲
                  └───────────────── what is known ─────────────┘

Quick trials and slow ones have a process each, started with the first grammar, in which one is tried after the other,
who has used least before who has used more. So what compiles soon waits for a few that do, and never for one that does
not. Where too much waits, the latest of who has most there is refused. A request that has ended is passed over.

Who has not been found sound or refused when its time is over, counted from its arrival, is told that there was none for
it: whatever others ask for, nobody waits longer. What is being tried then is tried to its end all the same, so that who
asks again finds it known.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import socket
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import trio

import engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import Cause, InvalidGrammar
from engine.fair_queue import FairQueues
from engine.grammar_trial_frames import HEADER_SIZE, Answer, Trial, encode_frame, frame_size
from engine.outputs import RequestId
from engine.sampling_params import SamplingParams
from engine.structured_output.grammar import Grammar
from engine.structured_output.manager import StructuredOutputManager, refusal
from engine.structured_output.params import StructuredOutputsParams, shown_form
from engine.structured_output.timed import TimedGrammar
from transport.process import Child, describe_exit, open_child

logger = logging.getLogger(__name__)

MAX_KNOWN = 256
"""Findings that are kept, of those that were asked for last."""
QUICK_TRIALS_S = (0.008, 0.025)
"""Processor time of the quick trials: what a usual schema takes, and a large one; what needs more is tried anew."""
LONG_CHARS = 50_000
SHORT_PART = 0.2
"""A grammar so long may take all of the time that is set, the shortest this part of it.

Three to five times what honest ones take, which is in proportion to their length: 9 ms with a few characters, 70 with
so many. What costs most is short: a few characters that stand for very many states.
"""
MAX_QUICK, MAX_SLOW = 512, 32
"""Grammars that may await each quick trial, and the slow one, which has all the time that its grammar may take."""
NICENESS, SLOW_NICENESS = 2, 10
"""How far a quick trial stands behind the engine's steps, which share its processors, and a slow one."""
STARTED_PART = 0.5
"""Of its time, what each who waits while the first process starts has once that has given its first answer."""
MAX_START_S = 3.0
"""After the first grammar is wanted, how long that answer may take; then time counts as if it were given."""
WALL_FACTOR = 20
"""How many times its processor time a trial may take by the clock; it stands behind all else that runs."""
MIN_WALL_S = 10.0
"""What it may take at least; the first one has its process started in that time."""
MASK_S = 0.005
"""Processor time that the mask of a token may take, fifty times what one of a usual form does."""
BURST_S = 0.5
"""How much more some masks of a request may take together."""
_ROOT = str(Path(engine.__file__).parent.parent)
# -P and the explicit path: the child imports this very engine, whatever folder it is started in.
# The guard stands before the imports, in which its parent may die too.
_MAIN = (
    f"import os, sys; sys.path.insert(0, {_ROOT!r}); from transport.spawn import child_guard; child_guard(); "
    "os.nice(int(sys.argv[2])); from engine.grammar_trial import main; main()"
)


class CompiledFor(NamedTuple):
    """The grammar of a request, or why there is none, or none any more."""

    request_id: RequestId
    grammar: Grammar | Cause


class _Wanted(NamedTuple):
    """A request that waits for its grammar, with that as text where it is known to be sound."""

    request_id: RequestId
    params: SamplingParams
    arrived_s: float
    lark: str = ""


class GrammarCompiler:
    """Finds the grammars that requests of one core wait for; `run` is its task."""

    def __init__(self, config: EngineConfig, core: EngineCore, deliver: Callable[[CompiledFor], None]) -> None:
        """Call `deliver`, which must not raise, with each grammar, and for each that turns out to take too much time.

        `core` is only asked who still waits.
        """
        self._core = core
        self._deliver = deliver
        self._answer_s = config.grammar_answer_time
        self._manager = StructuredOutputManager(config.model, core.capacity.vocab_size)
        self._known: OrderedDict[StructuredOutputsParams, Answer] = OrderedDict()
        self._waiting: dict[StructuredOutputsParams, list[_Wanted]] = {}
        most_s = config.grammar_compile_time
        self._quick = _TrialLane(QUICK_TRIALS_S, NICENESS, MAX_QUICK, most_s)
        self._slow = _TrialLane([most_s], SLOW_NICENESS, MAX_SLOW, most_s)
        self._has_begun, self._has_answered = trio.Event(), trio.Event()
        self._sound: list[tuple[float, int, _Wanted]] = []
        self._num_sound = trio.Semaphore(0)
        self._order = itertools.count()
        self._to_expire, self._expiring_next = trio.open_memory_channel[_Wanted](float("inf"))
        self._limiter = trio.CapacityLimiter(1)

    def want(self, request_id: RequestId, params: SamplingParams, client: str | None = None) -> None:
        """Ask for the grammar of a request of `client`; it is delivered once, unless the request ends before."""
        asked, wanted = params.structured_outputs, _Wanted(request_id, params, trio.current_time())
        assert asked is not None
        answer = self._known.get(asked)
        if answer is not None:
            self._known.move_to_end(asked)
            self._go_on(wanted, answer)
            return
        self._has_begun.set()
        self._to_expire.send_nowait(wanted)
        if asked in self._waiting:
            self._waiting[asked].append(wanted)
        else:
            self._waiting[asked] = [wanted]
            self._queue(self._quick, 0, client, asked)

    async def run(self) -> None:
        """Try and compile what is wanted until cancelled; a thread that compiles is waited for."""
        async with trio.open_nursery() as nursery:
            for lane in (self._quick, self._slow):
                nursery.start_soon(self._try_all, lane)
            nursery.start_soon(self._refuse_late)
            while True:
                await self._num_sound.acquire()
                *_, wanted = heapq.heappop(self._sound)
                if self._core.awaits_grammar(wanted.request_id):
                    await self._compile(wanted)

    def _queue(self, lane: _TrialLane, index: int, client: str | None, asked: StructuredOutputsParams) -> None:
        excess = lane.queues.put(index, client, asked)
        if excess is not None:
            told = f"{lane.max_waiting} new grammars wait to be tried already, and no more may: try again later"
            self._end_trial(excess, Cause("GrammarQueueFull", told))

    def _end_trial(self, asked: StructuredOutputsParams, answer: Answer | Cause) -> None:
        """Tell all who wait for what was found of `asked`, which is kept for who asks for the same."""
        if isinstance(answer, Answer):
            self._known[asked] = answer
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        for wanted in self._waiting.pop(asked):
            self._go_on(wanted, answer)

    def _go_on(self, wanted: _Wanted, answer: Answer | Cause) -> None:
        if isinstance(answer, Cause):
            self._deliver(CompiledFor(wanted.request_id, answer))
        elif answer.refusal is not None:
            self._deliver(CompiledFor(wanted.request_id, refusal(answer.refusal)))
        else:
            found = wanted._replace(lark=answer.lark)
            heapq.heappush(self._sound, (answer.within_s, next(self._order), found))
            self._num_sound.release()

    async def _compile(self, wanted: _Wanted) -> None:
        compile_it = self._manager.compile
        grammar = await trio.to_thread.run_sync(compile_it, wanted.params, wanted.lark, limiter=self._limiter)
        if not isinstance(grammar, Cause):
            budget = _Budget(partial(self._end_costly, wanted))
            grammar = TimedGrammar(grammar, budget.tell_mask, budget.tell_accepted)
        self._deliver(CompiledFor(wanted.request_id, grammar))

    def _end_costly(self, wanted: _Wanted) -> None:
        asked = wanted.params.structured_outputs
        assert asked is not None
        told = f"{shown_form(asked)} takes more than {1e3 * MASK_S:g} ms of processor time a token: make it simpler"
        self._deliver(CompiledFor(wanted.request_id, refusal(str(InvalidGrammar(told)))))

    async def _refuse_late(self) -> None:
        """Tell each whose time is over that there was none for its trial; those that arrive later end later."""
        await self._has_begun.wait()
        with trio.move_on_after(MAX_START_S):
            await self._has_answered.wait()
        started_s = trio.current_time() - (1 - STARTED_PART) * self._answer_s
        async for wanted in self._expiring_next:
            await trio.sleep_until(max(started_s, wanted.arrived_s) + self._answer_s)
            asked = wanted.params.structured_outputs
            assert asked is not None
            waiting = self._waiting.get(asked, [])
            if wanted in waiting:
                waiting.remove(wanted)
                told = f"within --grammar-answer-time {self._answer_s:g} seconds there was not enough processor time"
                told += f" left to try {shown_form(asked)}: try again, or make it simpler"
                self._deliver(CompiledFor(wanted.request_id, Cause("GrammarTimeout", told)))

    async def _try_all(self, lane: _TrialLane) -> None:
        """Have tried what waits in `lane`, in turn; what takes more time than that gives waits for the next trial."""
        await self._has_begun.wait()
        async with AsyncExitStack() as stack:
            await lane.start(stack)  # also the slow one at once: who needs it has no time for its start
            while True:
                index, client, asked = await lane.queues.get()
                if not any(self._core.awaits_grammar(wanted.request_id) for wanted in self._waiting[asked]):
                    del self._waiting[asked]
                    continue
                answer = await lane.try_out(stack, index, asked)
                self._has_answered.set()
                if isinstance(answer, Cause) or not answer.takes_longer or lane is self._slow:
                    self._end_trial(asked, answer)
                elif index + 1 < len(lane.shares_s) and len(self._slow.queues):  # else it would stand idle
                    self._queue(lane, index + 1, client, asked)
                else:
                    self._queue(self._slow, 0, client, asked)


def time_for(asked: StructuredOutputsParams, most_s: float) -> float:
    """Return the processor time that a grammar may take by its length, where the longest may take `most_s`."""
    text = getattr(asked, asked.kind)
    num_chars = sum(map(len, text)) if isinstance(text, str | tuple) else 0
    return most_s * min(1.0, SHORT_PART + (1 - SHORT_PART) * num_chars / LONG_CHARS)


class _Budget:
    """Whether the masks of one request have taken more processor time than they may; no trial walks for so long."""

    def __init__(self, tell_exceeded: Callable[[], None]) -> None:
        """Call `tell_exceeded` once, should it be."""
        self._tell_exceeded = tell_exceeded
        self._left_s = BURST_S

    def tell_mask(self, took_s: float) -> None:
        """Take away what one more mask took, and give what it may take."""
        self._left_s = min(BURST_S, self._left_s + MASK_S)
        self.tell_accepted(took_s)

    def tell_accepted(self, took_s: float, num_tokens: int = 0) -> None:
        """Take away what it took to accept tokens."""
        was_left, self._left_s = self._left_s >= 0, self._left_s - took_s
        if was_left and self._left_s < 0:
            self._tell_exceeded()


class _TrialLane:
    """Trials of which each may take some of `shares_s` of processor time, the process for them, and what awaits them.

    Who has had less is tried before who has had more.
    """

    def __init__(self, shares_s: Sequence[float], niceness: int, max_waiting: int, most_s: float) -> None:
        self.queues: FairQueues[StructuredOutputsParams] = FairQueues(len(shares_s), max_waiting)
        self.shares_s = shares_s
        self.max_waiting = max_waiting
        self._niceness = niceness
        self._most_s = most_s
        self._trial: _Trial | None = None

    async def start(self, stack: AsyncExitStack) -> Cause | None:
        """Have a process on `stack` that is not known to have ended; return why there is none, if so."""
        try:
            if self._trial is not None and self._trial.child.returncode is not None:
                await self._end(stack)
            if self._trial is None:
                self._trial = await stack.enter_async_context(_open_trial(self._niceness))
        except (OSError, RuntimeError) as error:
            return Cause.of(error)
        return None

    async def try_out(self, stack: AsyncExitStack, index: int, asked: StructuredOutputsParams) -> Answer | Cause:
        """Have `asked` tried within one of the shares.

        A process that ended or stands still says nothing of it, and the next one gets a new process. Where it ended,
        that one is asked at once, for a form ends no more than a fork.
        """
        trial = Trial(asked, min(self.shares_s[index], time_for(asked, self._most_s)))
        answer = await self._ask(stack, trial)
        if isinstance(answer, Cause) and answer.type == "GrammarTrialDied":
            answer = await self._ask(stack, trial)
        return answer

    async def _ask(self, stack: AsyncExitStack, trial: Trial) -> Answer | Cause:
        failure = await self.start(stack)
        if failure is not None:
            return failure
        assert self._trial is not None
        child = self._trial.child
        wall_s = max(MIN_WALL_S, WALL_FACTOR * self._most_s)
        with trio.move_on_after(wall_s):
            answer = await self._trial.ask(trial)
            if answer is not None:
                return answer
            await child.wait()
        has_died = child.returncode is not None
        await self._end(stack)
        if not has_died:
            told = f"the process that tries grammars gave no answer within {wall_s:g} seconds and was killed; try again"
            return Cause("GrammarTrialStuck", told)
        assert child.returncode is not None
        told = describe_exit("the process that tries grammars", child.returncode, child.stderr_tail)
        return Cause("GrammarTrialDied", told)

    async def _end(self, stack: AsyncExitStack) -> None:
        self._trial = None
        await stack.aclose()  # kills one that stands still


class _Trial:
    """A trial process and the line to it."""

    def __init__(self, child: Child, line: trio.SocketStream) -> None:
        self.child = child
        self._line = line

    async def ask(self, trial: Trial) -> Answer | None:
        """Return what the process finds, or None where it died."""
        with contextlib.suppress(trio.BrokenResourceError):
            await self._line.send_all(encode_frame(trial))
            header = await self._read(HEADER_SIZE)
            body = await self._read(frame_size(header)) if header else b""
            return msgspec.msgpack.decode(body, type=Answer) if body else None
        return None

    async def _read(self, size: int) -> bytes:
        """Return `size` bytes, or none where the line has ended before."""
        parts = b""
        while len(parts) < size:
            part = await self._line.receive_some(size - len(parts))
            if not part:
                return b""
            parts += part
        return parts


@asynccontextmanager
async def _open_trial(niceness: int) -> AsyncIterator[_Trial]:
    """Start a trial process; leaving the block ends it."""
    ours, theirs = socket.socketpair()
    async with AsyncExitStack() as stack:
        line = await stack.enter_async_context(trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        with theirs:
            argv = [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), str(niceness)]
            opened = open_child(
                "grammar trial", argv, term_grace_s=0, on_stderr_line=logger.debug, pass_fds=[theirs.fileno()]
            )
            child = await stack.enter_async_context(opened)
        yield _Trial(child, line)
