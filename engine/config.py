"""Frozen settings, resolved once and never changed after; the one source of the command line's flags and their help.

A field's annotation carries its help, bounds and unit, so that flag, Python keyword and check cannot drift apart.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from engine.errors import ConfigError
from engine.models import DEFAULT, NULL_MODEL

MAX_THREADS = 256
"""Of a step: as many as a team of the operations in C takes (source/team.h)."""

Device = str
SchedulingPolicy = Literal["fcfs", "priority", "fair"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]
HeadQuantization = Literal["auto", "none", "int8", "int4"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "int8"]
Kernels = Literal["auto", "compiled", "torch"]
ToolCallParser = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "none"]
ReasoningParser = Literal["auto", "think", "none"]
ModelImpl = Literal["auto", "own", "transformers"]


class _Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of settings: checked on construction against the annotations of the fields."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: Naming the flag, its value and what is allowed.
        """
        for setting in settings_of(type(self)):
            value = getattr(self, setting.name)
            if value is not setting.default:
                setting.check(value)
        self.check_together()

    def check_together(self) -> None:
        """Check what spans several fields; raises ConfigError."""

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Construct from keywords; an unknown one is a ConfigError naming it and its nearest neighbours."""
        unknown = fields.keys() - {setting.name for setting in settings_of(cls)}
        if unknown:
            known = ", ".join(sorted(setting.name for setting in settings_of(cls)))
            raise ConfigError(f"unknown setting {sorted(unknown)[0]!r}; known are: {known}")
        return cls(**fields)


class EngineConfig(_Settings, frozen=True, kw_only=True):
    """How one engine runs. Passed whole to the engine's process; nothing is read from anywhere else."""

    model: Annotated[str, Meta(description="name of a known model, model folder, GGUF file, hub id, or null")] = DEFAULT
    revision: Annotated[str, Meta(description="branch, tag or commit of a hub id; its main when unset")] | None = None
    trust_remote_code: Annotated[bool, Meta(description="refused: nothing from a model's files is executed")] = False
    dtype: Annotated[Dtype, Meta(description="weights and K/V; auto takes the checkpoint's")] = "auto"
    model_impl: Annotated[
        ModelImpl,
        Meta(description="auto takes our own model code where it can, else transformers', checked"),
    ] = "auto"
    quantization: Annotated[
        Quantization, Meta(description="storage form of the linear layers; none: that of the weights")
    ] = "none"
    head_quantization: Annotated[
        HeadQuantization, Meta(description="storage form of the head; auto: int8 where the layers are quantized")
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Meta(description="keys and values; auto takes what the weights have, or int8 where they are quantized"),
    ] = "auto"
    kernels: Annotated[
        Kernels,
        Meta(description="what our own model code runs on: operations in C, compiled at first use, or torch's"),
    ] = "auto"
    device: Annotated[Device, Meta(description="auto, cpu or cuda:N")] = "auto"
    max_model_len: (
        Annotated[
            int, Meta(description="longest prompt plus output, in tokens; the model's own when unset", ge=2, le=2**24)
        ]
        | None
    ) = None
    data_parallel_size: Annotated[
        int, Meta(description="engine processes that share the requests, each with the whole model", ge=1, le=1024)
    ] = 1
    max_num_seqs: Annotated[int, Meta(description="most requests in one step", ge=1, le=65536)] = 64
    max_num_batched_tokens: Annotated[int, Meta(description="most tokens in one step", ge=1, le=1048576)] = 512
    max_num_waiting: Annotated[
        int, Meta(description="most requests that may wait; more are refused (429)", ge=0, le=2**20)
    ] = 1024
    queue_timeout: (
        Annotated[
            float, Meta(description="seconds a request may wait for its first step; then it fails (503)", ge=0, le=1e6)
        ]
        | None
    ) = None
    grammar_compile_time: Annotated[
        float,
        Meta(
            description="seconds of processor time a schema or grammar may take to compile, a short one a fifth of it; "
            "more is refused (400)",
            ge=0.01,
            le=60,
        ),
    ] = 0.25
    grammar_answer_time: Annotated[
        float,
        Meta(
            description="seconds from its arrival in which a new schema or grammar is tried; later it is refused (503)",
            ge=0.01,
            le=3600,
        ),
    ] = 0.8
    block_size: Annotated[int, Meta(description="tokens a KV block", ge=1, le=4096)] = 16
    kv_cache_memory_bytes: (
        Annotated[
            int,
            Meta(description="memory for keys and values of an engine, in bytes; computed when unset", ge=1, le=2**50),
        ]
        | None
    ) = None
    num_gpu_blocks_override: (
        Annotated[int, Meta(description="KV blocks, in place of what the memory would give", ge=1, le=2**31)] | None
    ) = None
    enable_prefix_caching: Annotated[bool, Meta(description="share the K/V of equal prompt beginnings")] = True
    enable_chunked_prefill: Annotated[bool, Meta(description="split prompts that exceed a step's budget")] = True
    long_prefill_token_threshold: Annotated[
        int, Meta(description="most tokens of one prompt in one step; 0 for no limit", ge=0, le=2**24)
    ] = 0
    watermark: Annotated[
        float, Meta(description="share of the KV blocks left free when a request joins running ones", ge=0, lt=1)
    ] = 0.01
    max_overtakes: Annotated[
        int, Meta(description="later requests that may start before a waiting one that does not fit", ge=0, le=2**20)
    ] = 32
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Meta(description="order of requests: by arrival, by their priority, or in turn by client (user)"),
    ] = "fcfs"
    stream_interval: Annotated[
        int, Meta(description="new tokens an output of a stream waits for; requests may ask for more", ge=1, le=65536)
    ] = 1
    seed: Annotated[
        int, Meta(description="of the client's generator, for requests without a seed", ge=0, le=2**63 - 1)
    ] = 0
    prefix_hash_seed: (
        Annotated[str, Meta(description="salt of the prefix hashes; drawn at random when unset")] | None
    ) = None
    num_threads: (
        Annotated[
            int,
            Meta(
                description="threads of a step; when unset an equal share of the cores, one in 16 of which is left",
                ge=1,
                le=MAX_THREADS,
            ),
        ]
        | None
    ) = None
    spin: Annotated[
        float, Meta(description="microseconds that a thread of a step waits awake for the others", ge=0, le=1e6)
    ] = 50.0
    null_step_ms: Annotated[
        float, Meta(description="time a step of the null model takes, in milliseconds", ge=0, le=60000)
    ] = 0.0
    step_timeout: Annotated[
        float,
        Meta(
            description="seconds without a finished step, work pending, after which the engine ends; 0 for never",
            ge=0,
            le=1e6,
        ),
    ] = 300.0
    log_iterations: Annotated[bool, Meta(description="log a line for every step")] = False
    profile_dir: (
        Annotated[str, Meta(description="folder for the traces that start_profile and stop_profile write")] | None
    ) = None
    shutdown_timeout: Annotated[
        float, Meta(description="seconds that running requests may go on after a stop; 0 aborts them", ge=0)
    ] = 0.0
    chat_template: (
        Annotated[str, Meta(description="file of a Jinja chat template, in place of the model's own")] | None
    ) = None
    tool_call_parser: Annotated[
        ToolCallParser,
        Meta(description="how the model writes calls of tools; auto looks into its chat template"),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(description="whether the model writes reasoning, in think tags; auto looks into its chat template"),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severity that is logged")
    ] = "info"

    def check_together(self) -> None:
        """Check budgets against each other and the device's form."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}: "
                f"a step could not give each request a token; raise the first or lower the second"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < (self.max_model_len or 0):
            raise ConfigError(
                f"without chunked prefill --max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-model-len {self.max_model_len}: a longer prompt could never run"
            )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ConfigError(
                f"--long-prefill-token-threshold {self.long_prefill_token_threshold} splits prompts, which "
                f"--no-enable-chunked-prefill forbids: drop one of the two"
            )
        if self.model == NULL_MODEL and self.model_impl != "auto":
            raise ConfigError(f"--model-impl {self.model_impl}: the model {NULL_MODEL} has one implementation")
        if self.model == NULL_MODEL and self.dtype != "auto":
            raise ConfigError(f"--dtype {self.dtype}: the model {NULL_MODEL} has no weights; leave --dtype out")
        if self.model == NULL_MODEL and {self.quantization, self.head_quantization} - {"none", "auto"}:
            raise ConfigError(f"--quantization: the model {NULL_MODEL} has no weights; leave it out")
        if self.quantization != "none" and self.kernels == "torch":
            raise ConfigError(
                f"--quantization {self.quantization} needs the operations in C: leave --kernels torch out, or the first"
            )
        if self.trust_remote_code:
            raise ConfigError(
                "--trust-remote-code: code that comes with a model is never executed here; leave the flag out, and "
                "`models check` says whether the model runs without"
            )
        kind, _, index = self.device.partition(":")
        if kind not in {"auto", "cpu", "cuda"} or (index and (kind != "cuda" or not index.isdecimal())):
            raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if kind == "cuda":
            raise ConfigError(f"--device {self.device}: only CPU back ends exist in this version; use --device cpu")


class ServeConfig(_Settings, frozen=True, kw_only=True):
    """How the HTTP server listens."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen on; 0 takes a free one", ge=0, le=65535)] = 8000
    uds: Annotated[str, Meta(description="path of a unix socket to listen on, in place of host and port")] | None = None
    api_key: (
        Annotated[str, Meta(description="what clients must send as bearer token; METRONOME_API_KEY does the same")]
        | None
    ) = None
    served_model_name: (
        Annotated[str, Meta(description="the name under which the model is served; its own when unset")] | None
    ) = None
    root_path: Annotated[str, Meta(description="path under which a proxy shows the server, such as /llm")] = ""
    enable_operations: Annotated[
        bool, Meta(description="answer /pause, /sleep and their like also without a key or a unix socket")
    ] = False

    def check_together(self) -> None:
        """Check the forms of names and paths."""
        for name in ("uds", "api_key", "served_model_name"):
            if getattr(self, name) == "":
                raise ConfigError(f"--{name.replace('_', '-')} must not be empty; leave it out instead")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("--api-key must be printable ASCII: it is sent in a header")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path must begin with a slash and not end with one, got {self.root_path!r}")


class Setting(NamedTuple):
    """One field of a settings struct, as flags and checks need it."""

    name: str
    kind: type
    optional: bool
    choices: tuple[str, ...]
    meta: Meta
    default: Any

    @property
    def flag(self) -> str:
        """The field's flag on the command line."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raise ConfigError unless `value` is of the right type and inside the bounds."""
        if value is None and self.optional:
            return
        accepted: tuple[type, ...] = (int, float) if self.kind is float else (self.kind,)
        wrong = not isinstance(value, accepted)
        if wrong or (isinstance(value, bool) and self.kind is not bool):
            raise ConfigError(f"{self.flag} must be of type {self.kind.__name__}, got {value!r}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.flag} must be one of {', '.join(self.choices)}, got {value!r}")
        low, high, below = self.meta.ge, self.meta.le, self.meta.lt
        if below is not None and not value < below:
            raise ConfigError(f"{self.flag} must be below {below}, got {value}")
        if low is not None and not value >= low:
            raise ConfigError(f"{self.flag} must be at least {low}, got {value}")
        if high is not None and not value <= high:
            raise ConfigError(f"{self.flag} must be at most {high}, got {value}")


@functools.cache
def settings_of(settings: type[_Settings]) -> tuple[Setting, ...]:
    """Describe every field of a settings struct, in order of declaration."""
    return tuple(_describe(settings))


def _describe(settings: type[_Settings]) -> Iterator[Setting]:
    hints = get_type_hints(settings, include_extras=True)
    for field in msgspec.structs.fields(settings):
        hint = hints[field.name]
        options = get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)
        kind, meta = get_args(options[0])
        choices: tuple[str, ...] = get_args(kind) if get_origin(kind) is Literal else ()
        yield Setting(field.name, str if choices else kind, len(options) > 1, choices, meta, field.default)
