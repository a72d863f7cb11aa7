"""Where the server listens: a TCP address or a unix socket, taken before a model is loaded.

A unix socket is its owner's alone (mode 0600) before anybody can connect. A file that a killed server left is replaced,
one that a living server answers on is not; the folder is locked meanwhile, so that of two servers that start at once
one gets the path and the other an error. The file is removed at the end, unless it is another server's by then.

Connections are accepted as many at a time as wait. Trio's own listener accepts one a turn of the loop, and a turn in
which 64 streams are written takes milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import trio

from engine.config import ServeConfig
from engine.errors import ConfigError

teardown = logging.getLogger("teardown")

BACKLOG = 65535
"""Connections that may wait until they are accepted; the kernel takes as many as it allows (net.core.somaxconn)."""
MAX_ACCEPTED_AT_ONCE = 64
"""Connections accepted and not yet begun with, on all listeners together: a storm of them must not hold up the streams
that run, nor take the descriptors that are kept from connections."""


@contextlib.asynccontextmanager
async def open_listeners(config: ServeConfig) -> AsyncIterator[list[trio.SocketListener]]:
    """Bind the configured address, before a model is loaded; leaving the block closes what `serve` has not closed.

    Raises:
        ConfigError: The address cannot be had; the operator's fault.
    """
    if config.uds is not None:
        with _unix_listener(Path(config.uds)) as listener:
            yield [listener]
        return
    try:
        listeners = await trio.open_tcp_listeners(config.port, host=config.host, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {said}; {_remedy(error)}") from error
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.socket.close()


class Arrivals:
    """What the listeners of one server share.

    Attributes:
        num_waiting: Connections that were accepted and that nobody has begun with; who begins with one counts down.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.num_waiting = 0


class EagerListener(trio.abc.Listener[trio.SocketStream]):
    """Accepts all connections that wait at the price of one checkpoint, up to MAX_ACCEPTED_AT_ONCE of `arrivals`."""

    def __init__(self, listener: trio.SocketListener, arrivals: Arrivals) -> None:
        """Accept on `listener`, which is closed with this one."""
        self._listener = listener
        self._arrivals = arrivals
        self._accepted: deque[trio.SocketStream] = deque()

    async def accept(self) -> trio.SocketStream:
        """Return the next connection; those accepted with the last one come without a checkpoint, so take them at once.

        Raises:
            trio.ClosedResourceError: The listener is closed.
            OSError: As `trio.SocketListener.accept` does.
        """
        if not self._accepted:
            self._take_in(await self._listener.accept())
            self._accept_waiting()
        return self._accepted.popleft()

    async def aclose(self) -> None:
        """Close the listener; see `trio.SocketListener.aclose`."""
        await self._listener.aclose()

    def _accept_waiting(self) -> None:
        """Accept without waiting; what stands in the way meets the next call that waits."""
        own = self._listener.socket
        listening = socket.socket(own.family, own.type, own.proto, fileno=own.fileno())
        try:
            listening.setblocking(False)
            with contextlib.suppress(OSError):
                while self._arrivals.num_waiting < MAX_ACCEPTED_AT_ONCE:
                    accepted, _ = listening.accept()
                    self._take_in(trio.SocketStream(trio.socket.from_stdlib_socket(accepted)))
        finally:
            listening.detach()  # it is the listener's to close

    def _take_in(self, stream: trio.SocketStream) -> None:
        self._arrivals.num_waiting += 1
        self._accepted.append(stream)


def close_listeners(listeners: list[trio.SocketListener]) -> None:
    """Close listeners on which nobody accepts: whoever waits in their queues is refused. Idempotent."""
    for listener in listeners:
        listener.socket.close()
    teardown.debug("listeners closed")


def _remedy(error: Exception) -> str:
    if isinstance(error, socket.gaierror | UnicodeError) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        return "choose a --host that is an address of this machine, or a name that resolves to one"
    return "stop what uses the port, or choose --host and --port"


def address_of(listener: trio.SocketListener) -> str:
    """Return where clients find `listener`: `http://host:port`, or `unix:path`."""
    name = listener.socket.getsockname()
    if listener.socket.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _unix_listener(path: Path) -> Iterator[trio.SocketListener]:
    server = socket.socket(socket.AF_UNIX)
    try:
        with _folder_locked(path.parent):
            _remove_stale(path)
            server.bind(str(path))
            path.chmod(0o600)  # nobody can connect before listen
            own = path.stat()
            server.listen(BACKLOG)
    except OSError as error:
        server.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}; choose another path") from error
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(server))
    try:
        yield listener
    finally:
        listener.socket.close()
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), own):
                path.unlink()


@contextlib.contextmanager
def _folder_locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Remove a socket on which nobody listens; raises OSError where something else stands there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(0, "a file that is no socket stands there")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its backlog is full: it lives
    raise FileExistsError(0, "another server listens there")
