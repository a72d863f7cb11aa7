"""A server to measure: a process of our own on a free port, or one that runs already."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import trio

import engine
from engine.bench.http_client import Address, get
from engine.config import EngineConfig, settings_of
from engine.errors import Cause, ConfigError, EngineDeadError
from engine.executor.null import VOCAB_SIZE as NULL_VOCAB_SIZE
from engine.flags import flags_of
from engine.models import NULL_MODEL
from engine.program import EXIT_USAGE
from transport.process import Child, describe_exit, open_child
from transport.services import open_services
from transport.standard_error import write_to_stderr

SURE_VOCAB_SIZE = 32000
"""Ids that every language model has; a server does not tell how many it has."""
TERM_GRACE_S = 10.0
"""How long the server may take to stop in order before it is killed."""
_OWN_SETTINGS = {"model", "seed", "log_level", "enable_prefix_caching"}
"""What the measurement itself, and not only a server of its own, obeys, or does not depend on."""
_ROOT = str(Path(engine.__file__).parent.parent)
_MAIN = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); from transport.process import child_guard; child_guard(); "
    "from engine.cli import main; main()"
)
_READY = re.compile(r"ready: .* on (http://\S+)")
_PREFIX = "metronome: "


class Server(NamedTuple):
    """Where it listens, which model it serves, and how many token ids that surely has."""

    address: Address
    model: str
    vocab_size: int

    @classmethod
    async def at(cls, address: Address) -> Server:
        """Ask the server at `address` what it serves."""
        models = msgspec.json.decode(await get(address, "/v1/models"))
        model = str(models["data"][0]["id"])
        return cls(address, model, NULL_VOCAB_SIZE if model == NULL_MODEL else SURE_VOCAB_SIZE)


@asynccontextmanager
async def open_server(config: EngineConfig, url: str | None) -> AsyncIterator[Server]:
    """Use the server at `url`, or run one with `config` for the block; its death ends the block with its cause.

    Raises:
        ConfigError: Nobody listens at `url`, settings are given that a running server would not obey, or the server
            refuses its own.
        EngineDeadError: The server died.
    """
    if url is not None:
        _refuse_settings(config)
        yield await Server.at(Address.of(url))
        return
    ready = trio.Event()
    found = ""
    # Its log is needed for the address alone, unless it was asked for.
    is_shown = config.log_level in {"debug", "info"}

    def take_line(line: str) -> None:
        nonlocal found
        match = _READY.search(line)
        if match is not None:
            found = match[1]
            ready.set()
        if is_shown or " INFO " not in line:
            write_to_stderr(line)

    level = config.log_level if is_shown else "info"
    flags = flags_of(msgspec.structs.replace(config, log_level="warning"))
    argv = [sys.executable, "-P", "-c", _MAIN, "serve", *flags, "--log-level", level, "--port", "0"]
    child_of_ours = open_child("server", argv, term_grace_s=TERM_GRACE_S, on_stderr_line=take_line)
    async with child_of_ours as child, open_services() as services:
        services.start_soon(_raise_death, child)
        await ready.wait()
        yield await Server.at(Address.of(found))


async def _raise_death(child: Child) -> NoReturn:
    status = await child.wait()
    last = next((line for line in reversed(child.stderr_tail) if line.startswith(_PREFIX)), "")
    if status == EXIT_USAGE and last:
        raise ConfigError(last.removeprefix(_PREFIX))
    raise EngineDeadError(Cause("ServerDied", describe_exit(child.name, status, child.stderr_tail)))


def _refuse_settings(config: EngineConfig) -> None:
    own = EngineConfig()
    for setting in settings_of(EngineConfig):
        if setting.name not in _OWN_SETTINGS and getattr(config, setting.name) != getattr(own, setting.name):
            raise ConfigError(f"{setting.flag} cannot be given with --url: the server there has settings of its own")
