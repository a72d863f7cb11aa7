"""Grammars of a served engine, compiled beside its steps; what is new is tried in a process of its own before.

::

    step task ──want──▶ quick trial ──▶ a thread of this process ──deliver──▶ step task
                  │          └─what takes longer─▶ slow trial ─▲
                  └──────────────── what is known ─────────────┘

Each kind of trial has a queue and a process, started with its first grammar, in which one is tried after the other. So
what compiles soon waits for a few that do, and never for one that does not; where too much waits, the latest of who
has most there is refused. A request that has ended meanwhile is passed over.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import trio

import engine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import Cause
from engine.fair_queue import FairQueue
from engine.grammar_trial import Answer, encode_frame, frame_size
from engine.outputs import RequestId
from engine.sampling_params import SamplingParams
from engine.structured_output.grammar import Grammar
from engine.structured_output.manager import StructuredOutputManager, refusal
from engine.structured_output.params import StructuredOutputsParams
from transport.process import Child, describe_exit, open_child

logger = logging.getLogger(__name__)

MAX_KNOWN = 256
"""Findings that are kept, of those that were asked for last."""
QUICK_TRIAL_S = 0.012
"""Processor time of a quick trial, twice what a usual schema takes; what needs more is tried again, slowly."""
MAX_QUICK = 512
"""Grammars that may await a quick trial."""
MAX_SLOW = 32
"""Grammars that may await a slow one: some seconds of processor time."""
NICENESS, SLOW_NICENESS = 5, 10
"""How far a trial stands behind the engine's steps, which share its processors, and a slow one behind a quick one."""
WALL_FACTOR = 20
"""How many times its processor time a trial may take by the clock; it stands behind all else that runs."""
MIN_WALL_S = 10.0
"""What it may take at least; the first one has its process started in that time."""
_ROOT = str(Path(engine.__file__).parent.parent)
# -P and the explicit path: the child imports this very engine, whatever folder it is started in.
# The guard stands before the imports, in which its parent may die too.
_MAIN = (
    f"import os, sys; sys.path.insert(0, {_ROOT!r}); from transport.spawn import child_guard; child_guard(); "
    "from engine.grammar_trial import main; main()"
)


class CompiledFor(NamedTuple):
    """The grammar of a request, or why there is none."""

    request_id: RequestId
    grammar: Grammar | Cause


class _Wanted(NamedTuple):
    """A request that waits for its grammar, with that as text where it is known to be sound."""

    request_id: RequestId
    params: SamplingParams
    lark: str = ""


class GrammarCompiler:
    """Finds the grammars that requests of one core wait for; `run` is its task."""

    def __init__(self, config: EngineConfig, core: EngineCore, deliver: Callable[[CompiledFor], None]) -> None:
        """Call `deliver`, which must not raise, with each grammar; `core` is only asked who still waits."""
        self._core = core
        self._deliver = deliver
        self._most_s = config.grammar_compile_time
        self._manager = StructuredOutputManager(config.model, core.capacity.vocab_size)
        self._known: OrderedDict[StructuredOutputsParams, Answer] = OrderedDict()
        self._waiting: dict[StructuredOutputsParams, list[_Wanted]] = {}
        self._quick = _TrialLane(min(QUICK_TRIAL_S, self._most_s), NICENESS, self._most_s, MAX_QUICK)
        self._slow = _TrialLane(self._most_s, SLOW_NICENESS, self._most_s, MAX_SLOW)
        self._to_compile, self._compiled_next = trio.open_memory_channel[_Wanted](float("inf"))
        self._limiter = trio.CapacityLimiter(1)

    def want(self, request_id: RequestId, params: SamplingParams, client: str | None = None) -> None:
        """Ask for the grammar of a request of `client`; it is delivered once, unless the request ends before."""
        asked, wanted = params.structured_outputs, _Wanted(request_id, params)
        assert asked is not None
        answer = self._known.get(asked)
        if answer is not None:
            self._known.move_to_end(asked)
            self._go_on(wanted, answer)
        elif asked in self._waiting:
            self._waiting[asked].append(wanted)
        else:
            self._waiting[asked] = [wanted]
            self._queue(self._quick, client, asked)

    async def run(self) -> None:
        """Try and compile what is wanted until cancelled; a thread that compiles is waited for."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._try_all, self._quick)
            nursery.start_soon(self._try_all, self._slow)
            async for wanted in self._compiled_next:
                if self._core.awaits_grammar(wanted.request_id):
                    await self._compile(wanted)

    def _queue(self, lane: _TrialLane, client: str | None, asked: StructuredOutputsParams) -> None:
        excess = lane.queue.put(client, asked)
        if excess is not None:
            told = f"{len(lane.queue)} new grammars wait to be tried already, and no more may: try again later"
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
            self._to_compile.send_nowait(wanted._replace(lark=answer.lark))

    async def _compile(self, wanted: _Wanted) -> None:
        compile_it = self._manager.compile
        grammar = await trio.to_thread.run_sync(compile_it, wanted.params, wanted.lark, limiter=self._limiter)
        self._deliver(CompiledFor(wanted.request_id, grammar))

    async def _try_all(self, lane: _TrialLane) -> None:
        """Have tried what waits in `lane`, in turn."""
        async with AsyncExitStack() as stack:
            while True:
                client, asked = await lane.queue.get()
                if not any(self._core.awaits_grammar(wanted.request_id) for wanted in self._waiting[asked]):
                    del self._waiting[asked]
                    continue
                answer = await lane.try_out(stack, asked)
                if lane is self._quick and isinstance(answer, Answer) and answer.takes_longer:
                    self._queue(self._slow, client, asked)
                else:
                    self._end_trial(asked, answer)


class _TrialLane:
    """What awaits trials that may take `share_s` of processor time each, and the process in which they are made."""

    def __init__(self, share_s: float, niceness: int, most_s: float, max_waiting: int) -> None:
        self.queue: FairQueue[StructuredOutputsParams] = FairQueue(max_waiting)
        self._share_s = share_s
        self._niceness = niceness
        self._most_s = most_s
        self._trial: _Trial | None = None

    async def try_out(self, stack: AsyncExitStack, asked: StructuredOutputsParams) -> Answer | Cause:
        """Have `asked` tried; a process that ended or stands still says nothing of it, and the next gets a new one."""
        try:
            if self._trial is None:
                self._trial = await stack.enter_async_context(_open_trial(self._share_s, self._niceness))
        except (OSError, RuntimeError) as error:  # no process can be started
            return Cause.of(error)
        child = self._trial.child
        wall_s = max(MIN_WALL_S, WALL_FACTOR * self._most_s)
        with trio.move_on_after(wall_s):
            answer = await self._trial.ask(asked)
            if answer is not None:
                return answer
            await child.wait()
        has_died = child.returncode is not None
        self._trial = None
        await stack.aclose()  # kills one that stands still
        if not has_died:
            told = f"the process that tries grammars gave no answer within {wall_s:g} seconds and was killed; try again"
            return Cause("GrammarTrialStuck", told)
        assert child.returncode is not None
        told = describe_exit("the process that tries grammars", child.returncode, child.stderr_tail)
        return Cause("GrammarTrialDied", told)


class _Trial:
    """A trial process and the line to it."""

    def __init__(self, child: Child, line: trio.SocketStream) -> None:
        self.child = child
        self._line = line

    async def ask(self, asked: StructuredOutputsParams) -> Answer | None:
        """Return what the process finds, or None where it died."""
        with contextlib.suppress(trio.BrokenResourceError):
            await self._line.send_all(encode_frame(asked))
            header = await self._read(4)
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
async def _open_trial(share_s: float, niceness: int) -> AsyncIterator[_Trial]:
    """Start a trial process; leaving the block ends it."""
    ours, theirs = socket.socketpair()
    async with AsyncExitStack() as stack:
        line = await stack.enter_async_context(trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        with theirs:
            argv = [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), str(share_s), str(niceness)]
            opened = open_child(
                "grammar trial", argv, term_grace_s=0, on_stderr_line=logger.debug, pass_fds=[theirs.fileno()]
            )
            child = await stack.enter_async_context(opened)
        yield _Trial(child, line)
