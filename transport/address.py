"""Where a socket may listen or connect: files that only this user reaches, this machine, or beyond it encrypted.

::

    inproc://name                 inside this process
    ipc:///folder/name            a unix socket in a folder of mode 0700
    tcp://127.0.0.1:port          this machine
    tcp://host:port and a Curve   anywhere
"""

from __future__ import annotations

import errno
import ipaddress
import os
from dataclasses import dataclass, field

import zmq


@dataclass(frozen=True)
class Curve:
    """Keys that encrypt TCP and let in only those who know the listening side's public key.

    That key is never sent in the clear, so knowing it is what admits a peer: hand it on like a secret, through a pipe
    or the environment, not through an argument that every user of the machine can read.

    Attributes:
        public_key: Of the listening side; 40 characters of Z85.
        secret_key: Of the listening side, and only there.
    """

    public_key: bytes = field(repr=False)
    secret_key: bytes | None = field(default=None, repr=False)

    @classmethod
    def draw(cls) -> Curve:
        """Return new keys for a listening socket."""
        return cls(*zmq.curve_keypair())

    def for_peers(self) -> Curve:
        """Return what a connecting socket needs of them."""
        return Curve(self.public_key)


def check_listening(address: str, curve: Curve | None) -> None:
    """Refuse an address on which others than this user's processes, or holders of the keys, could be heard.

    Raises:
        OSError: It is refused; the message says what to do.
    """
    _check("bind", address, curve)
    if curve is not None and curve.secret_key is None:
        raise _refusal("bind", address, "a listening socket needs the secret key: use Curve.draw()")
    scheme, _, path = address.partition("://")
    if scheme != "ipc":
        return
    if not path.startswith("/"):
        raise _refusal("bind", address, "use the absolute path of a file in a folder of mode 0700")
    folder = os.stat(os.path.dirname(path))
    if folder.st_uid != os.geteuid() or folder.st_mode & 0o077:
        owner = f"owner {folder.st_uid}, mode {folder.st_mode & 0o777:o}"
        raise _refusal("bind", address, f"others may enter its folder ({owner}); make it this user's, with mode 700")


def check_connecting(address: str, curve: Curve | None) -> None:
    """Refuse an address to which messages would travel in the clear, beyond this machine.

    Raises:
        OSError: It is refused; the message says what to do.
    """
    _check("connect to", address, curve)


def _check(verb: str, address: str, curve: Curve | None) -> None:
    scheme, _, rest = address.partition("://")
    if scheme not in ("inproc", "ipc", "tcp"):
        raise OSError(errno.EPROTONOSUPPORT, f"cannot {verb} {address}: use ipc://, tcp:// or inproc://")
    if scheme == "tcp" and curve is None and not _is_loopback(rest.rpartition(":")[0]):
        raise _refusal(
            verb, address, "messages would leave this machine in the clear; give the socket a Curve, or use 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"


def _refusal(verb: str, address: str, why: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"cannot {verb} {address}: {why}")
