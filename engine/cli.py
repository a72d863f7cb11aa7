"""The command line: one verb a subcommand. Its flags are the fields of the settings structs and sampling parameters.

Exit codes: 0 after an orderly stop, 1 when the engine died (its cause last on standard error), 2 for wrong arguments or
configuration, 130 when what was asked for was interrupted, 128 + signal after a second signal.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TextIO, cast

import trio

from engine import __version__
from engine.client.async_llm import AsyncLLM
from engine.config import EngineConfig, ServeConfig
from engine.errors import ConfigError, EngineDeadError, ModelError, RequestError, root_cause
from engine.flags import SHARED, parse, sampling_from, settings_from
from engine.models.listing import ModelListing, list_models
from engine.models.store import pull
from engine.parser import make_parser
from engine.program import EXIT_DEAD, EXIT_INTERRUPTED, EXIT_OK, EXIT_PIPE, EXIT_USAGE, then, with_engine
from engine.progress import show_progress
from engine.signals import run_until_stopped
from engine.terminal import STANDARD_OUTPUT, show
from transport.standard_error import standard_error, write_to_stderr

logger = logging.getLogger("engine")

_SHORTAGES: dict[object, str] = {
    errno.EMFILE: "this process may open too few files: raise `ulimit -n`",
    errno.ENFILE: "this machine has too many open files",
    errno.ENOSPC: "free some space, or set TMPDIR to a folder that has some",
    errno.EAGAIN: "this user may start too few processes or threads: raise `ulimit -u`",
}
"""What the system refuses for want of something, and what to do."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the verb that `arguments` (the process's own when None) name, and exit."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the verb that `arguments` name; return the exit code."""
    try:
        options = parse(make_parser(), arguments)
        logging.basicConfig(
            stream=cast(TextIO, standard_error),
            level=getattr(options, "log_level", "info").upper(),
            format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
            force=True,
        )
        return _VERBS[options.verb](options)
    except KeyboardInterrupt:
        write_to_stderr("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        return _explain(root_cause(error))


def _explain(error: BaseException) -> int:
    """Say on standard error, last of all, what ended the program; return the exit code."""
    if isinstance(error, ConfigError | ModelError | RequestError):
        write_to_stderr(f"metronome: {error}")
        return EXIT_USAGE
    if isinstance(error, EngineDeadError):
        write_to_stderr(f"metronome: the engine died: {error}")
        return EXIT_DEAD
    if isinstance(error, BrokenPipeError):
        # Python flushes standard output once more at exit: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    shortage = _SHORTAGES.get(getattr(error, "errno", None))
    if shortage is not None and getattr(error, "filename", None) == STANDARD_OUTPUT:
        shortage = "it takes no more: free some space there, or send it elsewhere"
    if shortage is not None:
        write_to_stderr(f"metronome: {error}: {shortage}")
        return EXIT_USAGE
    raise error


# -- verbs -----------------------------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
    config, serve_config = settings_from(options, EngineConfig), settings_from(options, ServeConfig)
    return trio.run(run_until_stopped, partial(_serve_until, config, serve_config))


async def _serve_until(config: EngineConfig, serve_config: ServeConfig, stop: trio.Event) -> int:
    """Serve until `stop` or the engine's death; the address is taken before a model is loaded."""
    from web.listeners import close_listeners, open_listeners
    from web.serve import serve

    async def serve_engine(llm: AsyncLLM) -> None:
        over = trio.Event()
        async with trio.open_nursery() as watchers:
            watchers.start_soon(then, stop.wait, over.set)
            watchers.start_soon(then, llm.wait_ended, over.set)
            async with trio.open_nursery() as serving:
                addresses = await serving.start(
                    partial(serve, llm, listeners, shutdown_trigger=over.wait, config=serve_config)
                )
                _log_ready(llm, addresses)
            watchers.cancel_scope.cancel()
        if llm.death is not None:
            raise llm.death

    async with open_listeners(serve_config) as listeners:
        logger.info("metronome %s: starting %s", __version__, config.model)
        await with_engine(config, stop, serve_engine, give_up=partial(close_listeners, listeners))
    logger.info("stopped")
    return EXIT_OK


def _log_ready(llm: AsyncLLM, addresses: list[str]) -> None:
    ready = llm.ready
    logger.info(
        "ready: %s on %s (context %d tokens, %s KV blocks of %d tokens, up to %d requests at once, engine process%s)",
        llm.model_name,
        " ".join(addresses),
        ready.max_model_len,
        " + ".join(str(ready.num_kv_blocks) for ready in llm.readies),
        ready.block_size,
        llm.config.max_num_seqs * len(llm.readies),
        ("" if len(llm.readies) == 1 else "es") + " " + " ".join(str(ready.pid) for ready in llm.readies),
    )


def _generate(options: argparse.Namespace) -> int:
    from engine.generate import generate_until, model_and_prompt

    options.model, prompt = model_and_prompt(options.words, options.file, options.model)
    config, params = settings_from(options, EngineConfig, without=SHARED), sampling_from(options)
    return trio.run(run_until_stopped, partial(generate_until, config, prompt, params, options.chat))


def _chat(options: argparse.Namespace) -> int:
    from engine.chat import run_chat

    return run_chat(settings_from(options, EngineConfig, without=SHARED), sampling_from(options), options.system)


def _bench(options: argparse.Namespace) -> int:
    from engine.bench.verbs import BENCHES

    return BENCHES[options.bench](options)


def _models(options: argparse.Namespace) -> int:
    match options.action:
        case "pull":
            with show_progress() as progress:
                folder = pull(options.name, progress)
            show(f"{folder}\n")
        case "check":
            from engine.models.check import check

            with show_progress() as progress:
                said = check(options.name, progress)
            show(f"{said}\n")
        case _:
            _print_models(list_models())
    return EXIT_OK


def _print_models(models: list[ModelListing]) -> None:
    rows: list[tuple[str, ...]] = [
        ("NAME", "CACHED", "SIZE", "ARCHITECTURE", "CONTEXT", "WEIGHTS", "LICENSE", "ALSO CALLED")
    ]
    for model in models:
        size, context = f"{model.size_bytes / 1e6:.0f} MB", str(model.context_length or "")
        cached = "yes" if model.is_whole else "in part" if model.path else "no"
        described = (model.architecture, context, model.weights, model.license, ", ".join(model.aliases))
        rows.append((model.name, cached, size, *(text or "-" for text in described)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    show("".join(f"{line}\n" for line in lines))


_VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "serve": _serve,
    "generate": _generate,
    "chat": _chat,
    "bench": _bench,
    "models": _models,
}
