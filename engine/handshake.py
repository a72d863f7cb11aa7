"""How an engine process is started and greeted, and how its death is told: what its parents do alike, with Trio or not.

::

    parent                                     engine process
      │ ◀── EngineHello: rank, pid, version ───── │
      │ ─── Configure ──────────────────────────▶ │
      │ ◀── StartProgress …, EngineReady ──────── │   or EngineDead, with the phase that failed
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import engine
from engine.errors import Cause, ConfigError, EngineDeadError
from engine.protocol import PROTOCOL_VERSION, EngineHello, EngineMessage
from transport.codec import DecodeError
from transport.folder import open_folder
from transport.spawn import describe_exit

TERM_GRACE_S = 2.0
"""How long an engine process may take to exit after its last word, before it is killed."""
MAX_RECEIVED = 256
"""Messages that either side takes from a socket in one go."""
FOLDER_PREFIX = "metronome-sockets-"
"""Of the folders for sockets, in the folder for temporary files; after a kill the next start removes what is left."""

_ROOT = str(Path(engine.__file__).parent.parent)
# -P and the explicit path: the child imports this very engine, whatever folder it is started in.
# The guard stands before the engine's imports, in which its parent may die too.
_MAIN = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); from transport.spawn import child_guard; child_guard(); "
    "from engine.engine_process import main; main()"
)


@contextmanager
def open_socket_folder() -> Iterator[str]:
    """Give the path of a folder for an engine's sockets; see `transport.folder.open_folder`.

    Raises:
        ConfigError: None can be had where temporary files go.
    """
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(open_folder(FOLDER_PREFIX))
        except OSError as error:
            raise ConfigError(
                f"no folder for sockets can be had: {error.strerror or error}; set TMPDIR to a folder with a short "
                "path in which files can be made"
            ) from error
        yield folder


def engine_name(engine_index: int) -> str:
    """Return what messages call the engine with this rank."""
    return f"engine-{engine_index}"


def identity_of(engine_index: int) -> bytes:
    """Return the ZMQ identity of the engine with this rank."""
    return engine_index.to_bytes(2, "little")


def engine_argv(engine_index: int, request_address: str, output_address: str) -> list[str]:
    """Return program and arguments of an engine process that connects to its parent's two sockets."""
    return [sys.executable, "-P", "-c", _MAIN, str(engine_index), request_address, output_address]


def check_hello(identity: bytes, hello: EngineHello, pids: Mapping[int, int]) -> None:
    """Refuse an engine that is none of those that were started, or speaks another version of the protocol.

    `pids` are the processes that were started, by rank.

    Raises:
        EngineDeadError: Naming what is wrong with the hello.
    """
    if objection := _objection(identity, hello, pids):
        raise EngineDeadError(Cause("ProtocolError", f"refused a hello of process {hello.pid}: {objection}"))


def refuse_hello(error: DecodeError) -> NoReturn:
    """Refuse a hello that cannot be decoded.

    Raises:
        EngineDeadError: Always.
    """
    raise EngineDeadError(Cause("ProtocolError", f"refused a hello that cannot be decoded: {error}")) from error


def check_sender(message: EngineMessage, num_engines: int) -> None:
    """Refuse a message of an engine that there is not.

    Raises:
        EngineDeadError: Its number is none of `num_engines`.
    """
    index = message.engine_index
    if not 0 <= index < num_engines:
        said = f"refused an {type(message).__name__} of engine {index}: the engines are numbered 0 to {num_engines - 1}"
        raise EngineDeadError(Cause("ProtocolError", said))


def _objection(identity: bytes, hello: EngineHello, pids: Mapping[int, int]) -> str | None:
    rank, name = hello.engine_index, engine_name(hello.engine_index)
    if rank not in pids:
        return f"it calls itself {name}, and there are {', '.join(map(engine_name, pids))}"
    if identity != identity_of(rank):
        return f"{name} has the identity {identity_of(rank).hex()}, and it came under {identity.hex()}"
    if hello.version != PROTOCOL_VERSION:
        return f"{name} speaks version {hello.version} of the protocol, and this front {PROTOCOL_VERSION}"
    if hello.pid != pids[rank]:
        return f"{name} is process {pids[rank]}"
    return None


def death_of(engine_index: int, returncode: int, output_tail: Sequence[str], phase: str = "") -> EngineDeadError:
    """Describe the end of an engine process that said no last word: its status or signal, and what it wrote last.

    `phase` is where its start was, empty once it was ready.
    """
    message = describe_exit(engine_name(engine_index), returncode, output_tail)
    if returncode == -signal.SIGALRM:
        message += ": its loop stood still (--step-timeout); the stacks of its threads stand above"
    began = [index for index, line in enumerate(output_tail) if line.startswith("Traceback ")]
    traceback = "\n".join(output_tail[began[-1] :]) if began else ""
    return EngineDeadError(Cause("EngineDied", message, traceback, phase, returncode))
