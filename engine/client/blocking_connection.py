"""Both directions to an engine process without an event loop: the caller's thread waits, on two descriptors.

::

    this thread                                        engine process
    poll ─┬─ pidfd ◀─────────────── its end ─────────────
          └─ PULL   ◀── progress, READY, outputs, last ── PUSH
             ROUTER ── Configure, requests, aborts … ──▶  DEALER

Waiting takes nothing, so it may be interrupted anywhere; `take` gives what waits, and the caller keeps it safe. What
the engine writes to stderr is passed on whenever this thread looks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import shutil
import threading
import time
from collections.abc import Iterator

from engine.bad_messages import refuse_bad_message
from engine.client.interrupts import InterruptsHeld
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError
from engine.handshake import (
    MAX_RECEIVED,
    check_hello,
    death_of,
    engine_argv,
    engine_name,
    identity_of,
    open_socket_folder,
    refuse_hello,
)
from engine.protocol import ClientMessage, Configure, EngineHello, EngineMessage
from transport.child_output import ChildOutput
from transport.codec import DecodeError, Decoder, Encoder
from transport.nonblocking_socket import CAN_RECEIVE, Context, NonblockingSocket, SocketKind, UnknownPeerError
from transport.spawn import returncode_of_zombie, start_child
from transport.standard_error import write_to_stderr

logger = logging.getLogger(__name__)


class BlockingConnection:
    """An engine process and the sockets to it, for one thread.

    Attributes:
        phase: Where the engine's start is, named if it dies; set by who reads its messages, empty once it is ready.
    """

    def __init__(self, engine_index: int = 0) -> None:
        """Open nothing yet."""
        self.phase = "process"
        self._engine_index = engine_index
        self._resources = contextlib.ExitStack()
        self._encoder = Encoder()
        self._decoder = Decoder[EngineMessage](EngineMessage)
        self._death: EngineDeadError | None = None

    def open(self, config: EngineConfig) -> None:
        """Start the engine process, greet it and give it its configuration; `close` also after a failure.

        Raises:
            ConfigError: This system has no descriptors for processes.
            EngineDeadError: The process ended before it said hello, or said something else.
            RuntimeError: Not called from the main thread.
        """
        name = engine_name(self._engine_index)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{name} must be opened from the main thread: a child dies with the thread that started it"
            )
        if not hasattr(os, "pidfd_open"):
            raise ConfigError('isolation "process" without Trio needs Linux, for pidfd_open: use isolation "none"')
        with InterruptsHeld():
            folder = self._start()
        self._greet(config)
        self._wait_for(self._pull, math.inf)
        shutil.rmtree(folder, ignore_errors=True)  # both ends are connected: from here on no kill can leave it behind

    def send(self, message: ClientMessage) -> None:
        """Send without waiting; a dead engine's messages are dropped."""
        try:
            self._router.give([identity_of(self._engine_index), *self._encoder.encode(message)])
        except UnknownPeerError:
            logger.debug("dropped %s: %s is gone", type(message).__name__, engine_name(self._engine_index))

    def wait(self, deadline_s: float = math.inf) -> bool:
        """Wait until a message may be taken; False at `deadline_s` of the monotonic clock.

        Raises:
            EngineDeadError: The process has ended and all it said was taken.
        """
        return self._wait_for(self._pull, deadline_s)

    def take(self) -> Iterator[EngineMessage]:
        """Yield the messages that wait, without waiting; what was yielded is gone from here, and nothing else.

        Raises:
            EngineDeadError: One of them cannot be read; those before it have been yielded.
        """
        for _ in range(MAX_RECEIVED):
            frames = self._pull.take()
            if frames is None:
                return
            try:
                message = self._decoder.decode(frames)
            except DecodeError as error:
                refuse_bad_message(error)
            else:
                yield message

    def wait_exit(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the process to end; what it still says stays unread."""
        if self._death is None:
            self._poll([self._pidfd], time.monotonic() + timeout_s)

    def close(self) -> None:
        """End what is left of the process and its group at once, and close all. Idempotent, not interrupted."""
        with InterruptsHeld():
            self._resources.close()

    def _start(self) -> str:
        """Open all that `close` closes and return the folder of the sockets."""
        resources = self._resources
        folder = resources.enter_context(open_socket_folder())
        context = Context()
        resources.callback(context.destroy, 0)
        self._router = NonblockingSocket(context, SocketKind.ROUTER)
        resources.callback(self._router.close)
        self._pull = NonblockingSocket(context, SocketKind.PULL)
        resources.callback(self._pull.close)
        self._output = ChildOutput(write_to_stderr)
        resources.callback(self._close_output)
        addresses = self._router.bind(f"ipc://{folder}/requests"), self._pull.bind(f"ipc://{folder}/outputs")
        argv = engine_argv(self._engine_index, *addresses)
        child, _ = start_child(resources, argv, {}, [folder], self._output.fileno())
        self._child = child
        self._pidfd = os.pidfd_open(child.pid)
        resources.callback(os.close, self._pidfd)
        return folder

    def _close_output(self) -> None:
        self._output.pass_on(is_last=True)
        self._output.close()

    def _greet(self, config: EngineConfig) -> None:
        self._wait_for(self._router, math.inf)
        frames = self._router.take()
        assert frames is not None
        try:
            hello = Decoder[EngineHello](EngineHello).decode(frames[1:])
        except DecodeError as error:
            refuse_hello(error)
        check_hello(bytes(frames[0]), hello, {self._engine_index: self._child.pid})
        self.send(Configure(config))

    def _wait_for(self, socket: NonblockingSocket, deadline_s: float) -> bool:
        """Wait until `socket` has a message; its descriptor only says that EVENTS may have changed."""
        while not socket.events & CAN_RECEIVE:
            if self._death is not None:
                raise self._death
            ready = self._poll([socket.fileno(), self._pidfd], deadline_s)
            if self._pidfd in ready:
                self._output.pass_on(is_last=True)
                returncode = returncode_of_zombie(self._child.pid)
                self._death = death_of(self._engine_index, returncode, list(self._output.tail), self.phase)
            elif not ready:
                return False
        return True

    def _poll(self, descriptors: list[int], deadline_s: float) -> list[int]:
        """Wait until some of `descriptors` are readable and return those; none at the deadline."""
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        left_s = deadline_s - time.monotonic()
        ready = poll.poll(None if math.isinf(left_s) else max(0, math.ceil(left_s * 1000)))
        self._output.pass_on()
        return [descriptor for descriptor, _ in ready]
