"""The command line: `serve`, `generate`, `models`. Its flags are the fields of the settings structs, nothing else.

Exit codes: 0 after an orderly stop, 1 when the engine died (its cause last on standard error), 2 for wrong arguments or
configuration, 128 + signal after a second signal.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec
import trio

from engine import __version__
from engine.client.async_llm import AsyncLLM
from engine.client.input_processor import PromptInput
from engine.config import EngineConfig, ServeConfig, Setting, settings_of
from engine.errors import ConfigError, EngineDeadError, ModelError, RequestError, root_cause
from engine.launch import open_engine
from engine.models import DEFAULT
from engine.progress import show_progress
from engine.sampling_params import SamplingParams
from engine.signals import run_until_stopped
from transport.services import open_services

logger = logging.getLogger("engine")

EXIT_OK = 0
EXIT_DEAD = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""An answer that was not given to its end."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the verb that `arguments` (the process's own when None) name, and exit."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the verb that `arguments` name; return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr,
        level=getattr(options, "log_level", "info").upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        force=True,
    )
    try:
        return int(options.verb_function(options))
    except Exception as error:
        return _explain(root_cause(error))


def _explain(error: BaseException) -> int:
    """Say on standard error, last of all, what ended the program; return the exit code."""
    if isinstance(error, ConfigError | ModelError | RequestError):
        print(f"metronome: {error}", file=sys.stderr)
        return EXIT_USAGE
    if isinstance(error, EngineDeadError):
        print(f"metronome: the engine died: {error}", file=sys.stderr)
        return EXIT_DEAD
    raise error


# -- flags -----------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="metronome", description="An LLM inference engine on Trio.")
    parser.add_argument("--version", action="version", version=f"metronome {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = verbs.add_parser("serve", help="serve a model over HTTP, OpenAI-compatible")
    _add_model(verb)
    _add_settings(verb.add_argument_group("server"), ServeConfig)
    _add_settings(verb.add_argument_group("engine"), EngineConfig)
    verb.set_defaults(verb_function=_serve)

    verb = verbs.add_parser("generate", help="complete a prompt and print it as it comes")
    _add_model(verb)
    verb.add_argument("prompt", metavar="PROMPT", help="the text to go on from")
    _add_sampling(verb.add_argument_group("sampling"))
    _add_settings(verb.add_argument_group("engine"), EngineConfig, log_level="warning")
    verb.set_defaults(verb_function=_generate)

    verb = verbs.add_parser("models", help="list known models, or fetch one")
    verb.add_argument("action", nargs="?", choices=["list", "pull"], default="list", help="(default: list)")
    verb.add_argument("name", nargs="?", default=DEFAULT, metavar="NAME", help=f"what to pull (default: {DEFAULT})")
    verb.set_defaults(verb_function=_models)
    return parser


_MODEL_HELP = "name of a known model, model folder, GGUF file, or null"


def _add_model(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("model", nargs="?", default=DEFAULT, metavar="MODEL", help=f"{_MODEL_HELP} (default: {DEFAULT})")


def _add_settings(group: Any, settings: type[EngineConfig] | type[ServeConfig], **defaults: Any) -> None:
    """Add a flag a field; `defaults` replace those of the fields for this verb."""
    for setting in settings_of(settings):
        if setting.name != "model":
            _add_flag(group, setting, defaults.get(setting.name, setting.default))


def _add_flag(group: Any, setting: Setting, default: Any) -> None:
    text = f"{setting.meta.description} (default: {'unset' if default is None else default})"
    if setting.kind is bool:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        return
    metavar = None if setting.choices else setting.kind.__name__.upper()
    choices = setting.choices or None
    group.add_argument(setting.flag, type=setting.kind, choices=choices, metavar=metavar, default=default, help=text)


def _add_sampling(group: Any) -> None:
    group.add_argument("--max-tokens", type=int, default=128, metavar="INT", help="most tokens (default: 128)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="FLOAT", help="0 is greedy (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="FLOAT", help="nucleus, in (0, 1] (default: 1)")
    group.add_argument("--top-k", type=int, default=0, metavar="INT", help="0 keeps all (default: 0)")
    group.add_argument("--chat", action="store_true", help="send the prompt as a chat message")


Settings = TypeVar("Settings", EngineConfig, ServeConfig)


def _settings(options: argparse.Namespace, kind: type[Settings]) -> Settings:
    return kind.of(**{setting.name: getattr(options, setting.name) for setting in settings_of(kind)})


# -- verbs -----------------------------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
    config, serve_config = _settings(options, EngineConfig), _settings(options, ServeConfig)
    return trio.run(run_until_stopped, partial(_serve_until, config, serve_config))


async def _serve_until(config: EngineConfig, serve_config: ServeConfig, stop: trio.Event) -> int:
    """Serve until `stop` or the engine's death; the address is taken before a model is loaded."""
    from web.listeners import open_listeners
    from web.serve import serve

    async def serve_engine(llm: AsyncLLM) -> None:
        over = trio.Event()
        async with trio.open_nursery() as watchers:
            watchers.start_soon(_then, stop.wait, over.set)
            watchers.start_soon(_then, llm.wait_ended, over.set)
            async with trio.open_nursery() as serving:
                addresses = await serving.start(
                    partial(serve, llm, listeners, shutdown_trigger=over.wait, config=serve_config)
                )
                _log_ready(llm, addresses)
            watchers.cancel_scope.cancel()
        if llm.death is not None:
            raise llm.death

    async with open_listeners(serve_config) as listeners:
        await _with_engine(config, stop, serve_engine)
    logger.info("stopped")
    return EXIT_OK


def _log_ready(llm: AsyncLLM, addresses: list[str]) -> None:
    ready = llm.ready
    logger.info(
        "ready: %s on %s (context %d tokens, %d KV blocks of %d tokens, up to %d requests at once, engine process %d)",
        llm.model_name,
        " ".join(addresses),
        ready.max_model_len,
        ready.num_kv_blocks,
        ready.block_size,
        llm.config.max_num_seqs,
        ready.pid,
    )


def _generate(options: argparse.Namespace) -> int:
    config = _settings(options, EngineConfig)
    params = SamplingParams(
        max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k
    )
    prompt = [{"role": "user", "content": options.prompt}] if options.chat else options.prompt
    return trio.run(run_until_stopped, partial(_generate_until, config, prompt, params))


async def _generate_until(config: EngineConfig, prompt: PromptInput, params: SamplingParams, stop: trio.Event) -> int:
    """Print the completion as it comes; `stop` aborts it."""

    async def print_completion(llm: AsyncLLM) -> None:
        async with trio.open_nursery() as watchers:
            watchers.start_soon(_then, stop.wait, watchers.cancel_scope.cancel)
            async with llm.generate(prompt, params) as stream:
                async for delta in stream:
                    print(delta.text, end="", flush=True)
            watchers.cancel_scope.cancel()
        print()

    await _with_engine(config, stop, print_completion)
    return EXIT_INTERRUPTED if stop.is_set() else EXIT_OK


def _models(options: argparse.Namespace) -> int:
    from engine.models.store import list_models, pull

    if options.action == "pull":
        with show_progress() as progress:
            print(pull(options.name, progress))
        return EXIT_OK
    for model in list_models():
        print(model)
    return EXIT_OK


# -- engines ---------------------------------------------------------------------------------------------------------


async def _with_engine(config: EngineConfig, stop: trio.Event, body: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    """Run `body` with an engine whose start `stop` cancels; once it is ready, `stop` is the body's business."""
    with trio.CancelScope() as loading, show_progress() as progress:
        async with open_services() as watchers:
            watchers.start_soon(_then, stop.wait, loading.cancel)
            async with open_engine(progress=progress, **msgspec.structs.asdict(config)) as llm:
                watchers.cancel()
                await body(llm)


async def _then(wait: Callable[[], Awaitable[None]], act: Callable[[], None]) -> None:
    await wait()
    act()
