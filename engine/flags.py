"""Flags of the command line: derived from the settings structs and the sampling parameters, or read from a TOML file.

A flag's name, type and default are those of the field it sets; its help is the field's. Nothing is said twice.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from engine.config import EngineConfig, ServeConfig, Setting, settings_of
from engine.errors import ConfigError
from engine.models import DEFAULT
from engine.sampling_params import RepetitionDetection, SamplingParams, StructuredOutputsParams

MODEL_HELP = f"name of a known model, model folder, GGUF file, hub id, or null (default: {DEFAULT})"

SAMPLING_HELP = {
    "temperature": "0 takes the most likely token; up to 2",
    "top_p": "keep the smallest set of most likely tokens with this probability, in (0, 1]",
    "top_k": "keep this many most likely tokens; 0 keeps all",
    "min_p": "drop tokens less likely than this share of the most likely one, in [0, 1]",
    "presence_penalty": "taken off the logit of every token that the output holds, -2 to 2",
    "frequency_penalty": "taken off a token's logit for each time that the output holds it, -2 to 2",
    "repetition_penalty": "divides the logits of tokens in prompt or output, 0.01 to 100; 1 for none",
    "logit_bias": "JSON object: token id to what is added to its logit, -100 to 100",
    "allowed_token_ids": "a token id that may be drawn, all others may not; may be given several times",
    "bad_words": "a word that must not come in the output; may be given several times",
    "logprobs": "tell each token's logprob and rank, and this many likeliest tokens, 0 to 20",
    "logprob_token_ids": "a token id whose logprob is told in place of the likeliest; may be given several times",
    "prompt_logprobs": "likewise for the prompt",
    "seed": "draws depend on (seed, position) alone; drawn when unset or -1",
    "max_tokens": "most tokens to generate; up to the context's end when unset",
    "min_tokens": "no end before this many tokens",
    "stop": "a string that ends the text; may be given several times",
    "stop_token_ids": "a token id that ends the text; may be given several times",
    "structured_outputs": "the text's form; JSON of one of json, json_object, regex, choice, grammar, structural_tag",
    "repetition_detection": "end output that goes in circles; JSON of max_pattern_size, min_pattern_size, min_count",
    "truncate_prompt_tokens": "keep only this many last tokens of the prompt; -1 for as many as fit",
    "skip_reading_prefix_cache": "compute the whole prompt, whatever is cached",
    "ignore_eos": "go on past the model's end token",
    "include_stop_str_in_output": "keep the stop string in the text",
    "skip_special_tokens": "leave special tokens out of the text",
    "detokenize": "make text of the tokens",
    "stream_interval": "new tokens that an output of a stream waits for",
    "n": "completions to draw, 1 to 128",
}
"""The fields of `SamplingParams` that have a flag, in the order of the help."""

SHARED = ("seed", "stream_interval")
"""Fields of `EngineConfig` whose flags are the sampling parameters' where a verb has both."""
_SHORT = {"data_parallel_size": ("-dp",)}
"""What some flags are called too."""
_NOT_IN_FILE = {"help", "config"}
Settings = TypeVar("Settings", EngineConfig, ServeConfig)


class _Collect(argparse.Action):
    """Collects a repeated flag; the first use replaces the default, for a flag wins over the file."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if getattr(namespace, self.dest) is self.default:
            setattr(namespace, self.dest, [])
        getattr(namespace, self.dest).append(values)


def add_model(verb: argparse.ArgumentParser) -> None:
    """Add the optional positional MODEL."""
    verb.add_argument("model", nargs="?", default=DEFAULT, metavar="MODEL", help=MODEL_HELP)


def add_config(verb: argparse.ArgumentParser) -> None:
    """Add --config, which `parse` obeys."""
    text = "TOML file with defaults for these flags: max-num-seqs = 32; flags given here win"
    verb.add_argument("--config", type=Path, metavar="FILE", help=text)
    verb.set_defaults(verb_parser=verb)


def add_settings(
    verb: argparse.ArgumentParser, settings: type[Settings], *, without: Sequence[str] = (), **defaults: Any
) -> None:
    """Add a flag a field of `settings` but `without`; `defaults` replace the fields' own for this verb."""
    group = verb.add_argument_group("engine" if settings is EngineConfig else "server")
    for setting in settings_of(settings):
        if setting.name not in {"model", *without}:
            _add_setting(group, setting, defaults.get(setting.name, setting.default))


def add_sampling(verb: argparse.ArgumentParser, *, without: Sequence[str] = (), **defaults: Any) -> None:
    """Add a flag a sampling parameter but `without`; `defaults` replace the parameters' own for this verb."""
    group = verb.add_argument_group("sampling")
    own = SamplingParams()
    for name, text in SAMPLING_HELP.items():
        if name not in without:
            _add_sampling_flag(group, name, text, defaults.get(name, getattr(own, name)))


def settings_from(options: argparse.Namespace, kind: type[Settings], *, without: Sequence[str] = ()) -> Settings:
    """Return the settings that `options` hold; a field without a flag, or one of `without`, keeps its default.

    Raises:
        ConfigError: A value is wrong.
    """
    names = {setting.name for setting in settings_of(kind)} - {*without}
    return kind.of(**{name: getattr(options, name) for name in names if hasattr(options, name)})


def sampling_from(options: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters that `options` hold; raises InvalidRequest if one is out of range."""
    return SamplingParams(**{name: getattr(options, name) for name in SAMPLING_HELP if hasattr(options, name)})


def flags_of(config: EngineConfig) -> list[str]:
    """Return the command line, model first, that gives `config`."""
    own = EngineConfig()
    words = [config.model]
    for setting in settings_of(EngineConfig):
        value = getattr(config, setting.name)
        if setting.name == "model" or value == getattr(own, setting.name):
            continue
        if setting.kind is bool:
            words.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        else:
            words += [setting.flag, str(value)]
    return words


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse `arguments`, with the file that --config names as defaults; exits with code 2 on wrong flags.

    Raises:
        ConfigError: The file cannot be read, or holds a key or a value that is no flag's.
    """
    options = _parse(parser, arguments)
    if getattr(options, "config", None) is None:
        return options
    options.verb_parser.set_defaults(**_read(options.config, options.verb_parser))
    return _parse(parser, arguments)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; words after flags join those before them, where a verb takes several."""
    options, rest = parser.parse_known_args(arguments)
    if rest and hasattr(options, "words") and not any(word.startswith("-") for word in rest):
        options.words = [*options.words, *rest]
    elif rest:
        is_named = any(word.partition("=")[0] == "--model" for word in rest)
        hint = "; the model is the first word behind the verb, without a flag" if is_named else ""
        getattr(options, "verb_parser", parser).error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return options


def _add_setting(group: Any, setting: Setting, default: Any) -> None:
    text = f"{setting.meta.description} (default: {_shown(default)})"
    if setting.kind is bool:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        return
    metavar = None if setting.choices else setting.kind.__name__.upper()
    choices = setting.choices or None
    names = [setting.flag, *_SHORT.get(setting.name, ())]
    group.add_argument(*names, type=setting.kind, choices=choices, metavar=metavar, default=default, help=text)


def _add_sampling_flag(group: Any, name: str, text: str, default: Any) -> None:
    hint = get_type_hints(SamplingParams)[name]
    kind = next((part for part in _alternatives(hint) if part is not NoneType), hint)
    options: dict[str, Any] = {"default": default, "help": f"{text} (default: {_shown(default)})"}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif kind in {RepetitionDetection, StructuredOutputsParams} or get_origin(kind) is dict:
        options |= {"type": _json, "metavar": "JSON"}
    elif get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        options |= {"type": kind, "metavar": kind.__name__.upper(), "action": _Collect}
    else:
        options |= {"type": kind, "metavar": kind.__name__.upper()}
    group.add_argument("--" + name.replace("_", "-"), **options)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


def _shown(default: Any) -> str:
    if default is None or default == () or default == {}:
        return "unset"
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def _read(path: Path, verb: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the file's values by destination, each checked against its flag."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # no UTF-8, or no TOML
        raise ConfigError(f"--config {path} is not TOML: {error}") from error
    actions = {action.dest: action for action in verb._actions if action.option_strings}
    values = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name == "model" and isinstance(value, str):
            values[name] = value
            continue
        if name not in actions or name in _NOT_IN_FILE:
            raise ConfigError(f"--config {path}: unknown key {key!r}; {verb.prog} --help names the flags there are")
        values[name] = _checked(value, actions[name], f"--config {path}: {key}")
    return values


def _checked(value: Any, action: argparse.Action, where: str) -> Any:
    kind: Any = bool if action.nargs == 0 else action.type or str
    if isinstance(action, _Collect):
        values = value if isinstance(value, list) else [value]
        return [_converted(part, kind, where) for part in values]
    if action.choices is not None and value not in action.choices:
        raise ConfigError(f"{where} must be one of {', '.join(action.choices)}, got {value!r}")
    return _converted(value, kind, where)


def _converted(value: Any, kind: Any, where: str) -> Any:
    if kind is _json:
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ConfigError(f"{where} must be of type {kind.__name__}, got {value!r}") from None
