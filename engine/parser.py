"""Every verb and its flags; what a verb does, cli.py knows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from engine import __version__
from engine.bench.forms import ALL, FORMS, MIX
from engine.config import EngineConfig, ServeConfig, settings_of
from engine.flags import MODEL_HELP, SHARED, add_config, add_model, add_sampling, add_settings
from engine.models import DEFAULT

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

CHAT = (
    "Talk with a model. On a terminal Ctrl-C stops the answer; at the prompt a second Ctrl-C, or Ctrl-D, ends the "
    "conversation. From a pipe each line is a turn. When the conversation leaves less than a quarter of the context "
    "(or --max-tokens, where that is less) for the answer, its oldest messages are dropped, which is said, with the "
    "numbers; a message that alone is too long is refused. Commands: /reset forgets the conversation, /exit ends it."
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="metronome", description="An LLM inference engine on Trio.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"metronome {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_serve(verbs)
    _add_generate(verbs)
    _add_chat(verbs)
    _add_benches(verbs)
    _add_models(verbs)
    return parser


def _add_verb(verbs: Verbs, name: str, usage: str, text: str, description: str = "") -> argparse.ArgumentParser:
    """Add a verb with a usage line that fits a screen; `text` stands in the list, above the flags `description`."""
    usage = f"%(prog)s {usage}"
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, allow_abbrev=False, help=text, usage=usage, description=description or f"{text[0].upper()}{text[1:]}."
    )
    return verb


def _add_serve(verbs: Verbs) -> None:
    verb = _add_verb(verbs, "serve", "[MODEL] [flags]", "serve a model over HTTP, OpenAI-compatible")
    add_model(verb)
    add_config(verb)
    add_settings(verb, ServeConfig)
    add_settings(verb, EngineConfig)


def _add_generate(verbs: Verbs) -> None:
    usage = "[MODEL] (PROMPT | - | --file FILE) [flags]"
    verb = _add_verb(verbs, "generate", usage, "complete a prompt and print it as it comes")
    text = f"MODEL: {MODEL_HELP}; PROMPT: the text to go on from, `-` reads standard input"
    verb.add_argument("words", nargs="*", metavar="MODEL PROMPT", help=text)
    verb.add_argument("--file", type=Path, metavar="FILE", help="read the prompt from FILE")
    verb.add_argument("--chat", action="store_true", help="send the prompt as a chat message")
    add_config(verb)
    add_sampling(verb, max_tokens=128, temperature=0.0)
    add_settings(verb, EngineConfig, without=SHARED, log_level="warning")
    verb.set_defaults(model=DEFAULT)


def _add_chat(verbs: Verbs) -> None:
    verb = _add_verb(verbs, "chat", "[MODEL] [flags]", "talk with a model in the terminal", CHAT)
    add_model(verb)
    verb.add_argument("--system", metavar="TEXT", help="system prompt; it is never dropped")
    add_config(verb)
    add_sampling(verb, without=["n", "logprobs", "prompt_logprobs"], max_tokens=None, temperature=0.7)
    add_settings(verb, EngineConfig, without=SHARED, log_level="warning")


def _add_benches(verbs: Verbs) -> None:
    """Add `bench NAME`; all share --json, --config, --seed and the engine's flags."""
    parser = verbs.add_parser(
        "bench", allow_abbrev=False, help="measure", description="Measure; see `bench NAME --help`."
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="NAME")

    verb = _add_verb(benches, "throughput", "[MODEL] [flags]", "all prompts at once, in this process")
    _add_bench_flags(verb, has_profile=True, num_prompts=64, input_len=128, output_len=128)
    text = "also time a decoding step by context and by requests; draw it to FILE as SVG (--input-len: their context)"
    verb.add_argument("--plot", type=Path, metavar="FILE", help=text)
    text = "tell the logprobs of so many likeliest tokens; also print what that costs, from four more runs"
    verb.add_argument("--logprobs", type=int, metavar="INT", help=text)
    text = f"print what it costs to hold answers, drawn at temperature 1, to a form: {', '.join(FORMS)}, {MIX} or {ALL}"
    verb.add_argument("--structured", choices=[*FORMS, MIX, ALL], metavar="FORM", help=text)

    verb = _add_verb(benches, "latency", "[MODEL] [flags]", "one stream at a time, without sockets")
    _add_bench_flags(verb, has_profile=True, num_prompts=8, input_len=128, output_len=128)

    verb = _add_verb(benches, "serve", "[MODEL] [flags]", "concurrent streams over real sockets")
    _add_bench_flags(verb, num_prompts=64, num_streams=32, input_len=128, output_len=128, url=None)

    text = "cut streams at random moments; time until nothing of them is left"
    verb = _add_verb(benches, "abort", "[MODEL] [flags]", text, _ABORT)
    _add_bench_flags(verb, num_streams=64, rounds=10, within_ms=500.0, input_len=64, output_len=1024, url=None)

    text = "how well a text is foretold, with and without --quantization"
    verb = _add_verb(benches, "perplexity", "[MODEL] [flags]", text)
    _add_bench_flags(verb, num_tokens=6144)
    verb.add_argument("--text", type=Path, metavar="FILE", help="score this file in place of Python's own help texts")

    text = "what plan and commit cost without a model, beside their limits"
    verb = _add_verb(benches, "scheduler", "[flags]", text)
    _add_counts(verb, num_running=256, num_waiting=100_000, num_blocks=1_000_000, rounds=15)
    policies = next(setting for setting in settings_of(EngineConfig) if setting.name == "scheduling_policy").choices
    verb.add_argument("--scheduling-policy", choices=policies, default=policies[0], help="(default: %(default)s)")
    _add_json(verb)

    verb = _add_verb(benches, "transport", "[flags]", "messages one way between two processes")
    _add_counts(verb, num_messages=100_000)
    _add_json(verb)


_ABORT = """\
Cut streams over sockets at random moments, then leave streams of `open_engine`, without sockets, at random moments of a
step, and print how long blocks are held. one leaves, left to free: of as many streams, which run on, one is left; from
then until its place and blocks are free in the engine. beyond its step: that without the longest step that was under
way meanwhile; the bar is that it is less than 3 ms for 99 of 100. all leave, left to told: all are left at once; of
each stream, from its leaving to the engine's word that no block is in use, not even of the stream that left last.
cancelled to told: the same from the cancellation of them all. seen to free: from the arrival of the first abort in the
engine. Each takes what is left of a step that was under way.
"""
_BENCH_HELP = {
    "num_messages": "of each size; fewer of the large ones",
    "num_prompts": "prompts in all",
    "num_running": "requests that decode",
    "num_tokens": "tokens of the text, at most",
    "num_waiting": "requests that wait, where many do",
    "num_blocks": "KV blocks, where there are many",
    "num_streams": "sockets open at once",
    "rounds": "how often it is done",
    "within_ms": "each is cut at a random moment of this time, in milliseconds",
    "input_len": "tokens a prompt",
    "output_len": "tokens an answer",
    "url": "measure the server at this address, http://host:port, in place of one of our own",
}


def _add_bench_flags(verb: argparse.ArgumentParser, *, has_profile: bool = False, **flags: int | float | None) -> None:
    add_model(verb)
    _add_counts(verb, **flags)
    _add_json(verb)
    if has_profile:
        text = "also print where the time of a step goes, and write the steps as a Chrome trace into --profile-dir"
        verb.add_argument("--profile", action="store_true", help=text)
    add_config(verb)
    folder = "metronome-profile" if has_profile else None
    add_settings(verb, EngineConfig, log_level="warning", enable_prefix_caching=False, profile_dir=folder)


def _add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def _add_counts(verb: argparse.ArgumentParser, **flags: int | float | None) -> None:
    for name, default in flags.items():
        kind = str if default is None else type(default)
        text = _BENCH_HELP[name] if default is None else f"{_BENCH_HELP[name]} (default: {default})"
        verb.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, metavar=kind.__name__.upper(), help=text
        )


def _add_models(verbs: Verbs) -> None:
    verb = _add_verb(verbs, "models", "[list | pull NAME | check PATH]", "list, fetch or check models")
    verb.add_argument("action", nargs="?", choices=["list", "pull", "check"], default="list", help="(default: list)")
    text = f"what to fetch, or the model of which to say what would run it (default: {DEFAULT})"
    verb.add_argument("name", nargs="?", default=DEFAULT, metavar="NAME", help=text)
