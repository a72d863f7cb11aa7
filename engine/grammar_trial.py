"""A process of its own in which a grammar is tried before the engine compiles it.

The compiler's limits bound its work, not all of its time, and neither its memory nor its stack: a schema of ninety
characters can take minutes, and a long chain of rules ends the process. So each new grammar is first made, compiled and
walked for a few steps here, over single bytes, with a part of the stack that the engine's threads have, and within
limits on processor time and memory that the kernel holds: a fork of this process that exceeds them dies, alone.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import statistics
import sys
import time
import traceback

import msgspec
import numpy as np
from llguidance import LLMatcher

from engine.errors import InvalidGrammar
from engine.grammar_trial_frames import HEADER_SIZE, Answer, Trial, encode_frame, frame_size
from engine.structured_output.lark import to_lark
from engine.structured_output.llguidance_backend import compute_mask, match, message_of
from engine.structured_output.params import StructuredOutputsParams, shown_form
from engine.structured_output.vocabulary import Vocabulary

MAX_MEMORY_BYTES = 512 * 2**20
"""Most memory of a trial, the interpreter's own included."""
STACK_BYTES = 2**20
"""The stack of a trial: an eighth of what a thread usually has."""
NUM_STEPS = 128
"""Bytes that a grammar is walked for."""
MAX_STEPS = 600
"""Bytes that one is walked for whose steps take ever longer, as of rules that read a text in very many ways."""
GROWTH = 8
"""How many times the processor time of its first steps the last ones then take: usual grammars' take about as much,
rules that read a text in very many ways 46 and more."""


def try_out(params: StructuredOutputsParams, vocabulary: Vocabulary) -> Answer:
    """Make the grammar of `params`, compile it and walk it for some steps."""
    try:
        lark = to_lark(params)
        matcher = match(params, lark, vocabulary, is_trial=True)
    except InvalidGrammar as error:
        return Answer(refusal=str(error))
    except MemoryError:
        return _refused(params, "needs too much memory to compile")
    _walk(matcher, vocabulary)
    if matcher.is_error():
        return Answer(refusal=str(InvalidGrammar(f"{params.kind}: {message_of(matcher)}: make it simpler")))
    return Answer(lark=lark)


def _walk(matcher: LLMatcher, vocabulary: Vocabulary) -> None:
    """Compute masks along some text that the grammar allows; it ends soon unless steps take ever longer."""
    draw = random.Random(0)
    took_s: list[float] = []
    for step in range(MAX_STEPS):
        if step == NUM_STEPS:
            first, last = took_s[: NUM_STEPS // 8], took_s[-NUM_STEPS // 8 :]
            if statistics.median(last) < GROWTH * statistics.median(first):
                return
        began_s = time.thread_time()
        mask = None if matcher.is_stopped() else compute_mask(matcher, vocabulary.size + 1)
        if mask is None:
            return
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocabulary.size])
        if not len(allowed):
            return
        matcher.consume_token(int(draw.choice(allowed)))
        took_s.append(time.thread_time() - began_s)


def main() -> None:
    """Be a trial process: the first argument is a socket's descriptor."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)])
    with socket.socket(fileno=int(sys.argv[1])) as line, line.makefile("rb") as incoming:
        while len(header := incoming.read(HEADER_SIZE)) == HEADER_SIZE:
            trial = msgspec.msgpack.decode(incoming.read(frame_size(header)), type=Trial)
            answer = _in_a_fork(trial.asked, vocabulary, trial.share_s)
            line.sendall(encode_frame(msgspec.structs.replace(answer, within_s=trial.share_s)))


def _in_a_fork(asked: StructuredOutputsParams, vocabulary: Vocabulary, most_s: float) -> Answer:
    """Try `asked` in a copy of this process, which the kernel ends by SIGPROF after so much processor time."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, most_s)
            with open(writing, "wb") as outgoing:
                outgoing.write(msgspec.msgpack.encode(try_out(asked, vocabulary)))
        except BaseException:  # the fork's main: told by its last words, and by an answer that is missing
            traceback.print_exc()
        finally:
            os._exit(0)  # nothing of this process is the copy's to clean up
    os.close(writing)
    with open(reading, "rb") as incoming:
        answer = incoming.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        fault = f"takes more than {most_s:.2g} seconds of processor time to compile, which --grammar-compile-time sets"
        return _refused(asked, f"{fault} for its length", takes_longer=True)
    if os.WIFSIGNALED(status) or not answer:
        return _refused(asked, "is nested too deeply, or needs too much memory to compile")
    return msgspec.msgpack.decode(answer, type=Answer)


def _refused(asked: StructuredOutputsParams, fault: str, *, takes_longer: bool = False) -> Answer:
    refusal = str(InvalidGrammar(f"{shown_form(asked)} {fault}: make it simpler"))
    return Answer(refusal=refusal, takes_longer=takes_longer)
