"""Which modules of transformers run rightly on our pages: found by what they do, before the first request.

A flag or a list of names would be a promise of others; several architectures call the attention function and are wrong
without a word (a bias that never reaches it, a state beside it, a mask that is more than causal). So a loaded module
is run on a few drawn tokens, and refused by the name of the first check that fails::

    layer types     config.json knows no kind of layer but full and sliding attention
    probe forward   the body runs on flat token ids and positions, and is run once by the whole model
    call a layer    the attention function is called once a layer, in order, with heads of one shape
    positions       it knows a row's position from the position ids alone, and does not count rows itself
    windows         a layer's window is the one of config.json
    eager           logits equal those of the whole model under transformers' own eager attention
    two sequences   two sequences flattened into one give what each gives alone
    chunks          a prompt in two chunks gives what it gives whole
    last position   a row at the last position changes nothing for the rows beside it

What is compared is rounded differently, so equality has a tolerance, which follows from the type; a router may take
another expert by such a rounding, so a check has three draws to pass once. A fault of structure fails all three.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import transformers
from torch.overrides import TorchFunctionMode

from engine.errors import ModelError, UnsupportedModel
from engine.models.transformers_backend import ATTENTION_NAME, AttentionCall, Body, TransformersShape, attending
from engine.models.whole_attention import WholeAttention

NUM_DRAWS = 3
"""Prompts that a check may try."""
LONG, SHORT, CHUNK = 24, 5, 13
"""Tokens of the two drawn sequences, and of the first chunk of the long one."""
WINDOW = 8
"""Windows are narrowed to this while comparing, so that they take part in a short prompt."""

Rows = Sequence[tuple[int, torch.Tensor, int]]
"""Sequence id, its token ids of this forward `[n]`, position of the first."""


@torch.inference_mode()
def inspect(body: Body, max_positions: int) -> TransformersShape:
    """Return the shape of a loaded module that attends under `ATTENTION_NAME`, or refuse it.

    Args:
        body: Whose module is inspected; its attention is as before when this returns.
        max_positions: Rows will have positions below this.

    Raises:
        UnsupportedModel: Naming the first check that failed.
    """
    config = body.module.config.get_text_config(decoder=True)
    _check_layer_types(body, config)
    shape = _probe(body, config, max_positions)
    with _narrowed(body, config, max_positions) as window:
        draws = [_Draw(body, shape, seed, window) for seed in range(NUM_DRAWS)]
        for name, detail, check in _CHECKS:
            if not any(_tried(body, name, check, draw) for draw in draws):
                _refuse(body, name, detail)
    return shape


class _Draw:
    """Two drawn sequences and what they give alone; computed when first asked for."""

    def __init__(self, body: Body, shape: TransformersShape, seed: int, window: int | None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.body, self.shape, self.window = body, shape, window
        self.long, self.short = (
            torch.randint(0, shape.vocab_size, (length,), generator=generator) for length in (LONG, SHORT)
        )
        self._alone: dict[str, torch.Tensor] = {}

    @property
    def long_alone(self) -> torch.Tensor:
        return self._once("long", lambda: self.run(WholeAttention(self.window), [(0, self.long, 0)])[0])

    @property
    def short_alone(self) -> torch.Tensor:
        return self._once("short", lambda: self.run(WholeAttention(self.window), [(0, self.short, 0)])[0])

    def run(self, memory: WholeAttention, rows: Rows) -> list[torch.Tensor]:
        """Run rows flattened; returns the logits of each sequence's rows."""
        lengths = [len(token_ids) for _, token_ids, _ in rows]
        positions = torch.cat([torch.arange(first, first + len(token_ids)) for _, token_ids, first in rows])
        with attending(memory.bind([(sequence, len(token_ids)) for sequence, token_ids, _ in rows])):
            hidden = self.body.hidden(torch.cat([token_ids for _, token_ids, _ in rows]), positions)
        return list(torch.split(self.body.logits(hidden), lengths))

    def equal(self, logits: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether the rows differ by no more than rounding does."""
        return are_equal(logits, expected, tolerance(self.body.module.dtype, self.shape.num_layers))

    def _once(self, name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._alone:
            self._alone[name] = compute()
        return self._alone[name]


def strange_layer_types(config: Any) -> list[str]:
    """Return the kinds of layers that a configuration of transformers names and that are not run."""
    kinds = set(map(str, getattr(config, "layer_types", None) or ()))
    return sorted(kinds - {"full_attention", "sliding_attention"})


def tolerance(dtype: torch.dtype, num_layers: int) -> float:
    """Return by how much of a row's spread two ways to the same logits may differ.

    Each of the two rounds about 4 values of the residual stream a layer to `dtype`, and sums products in float32 in
    orders of its own; such errors add up like a random walk, over the layers of both.
    """
    return math.sqrt(2 * num_layers) * (4 * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps)


def are_equal(logits: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether no row of `[n, vocab_size]` is off by more than `tolerance`, relative to how its scores spread."""
    error = (logits - expected).pow(2).mean(-1).sqrt() / expected.std(-1).clamp_min(1e-30)
    return bool((error <= tolerance).all())


def _equals_eager(draw: _Draw) -> bool:
    with _eager(draw.body):
        expected = draw.body.module(input_ids=draw.long[None], use_cache=False).logits[0].float()
    if not bool(expected.isfinite().all()):
        raise UnsupportedModel(f"its logits are not finite: {_origin_of_infinity(draw.body.module)}")
    return draw.equal(draw.long_alone, expected)


def _origin_of_infinity(module: torch.nn.Module) -> str:
    for name, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"{name} holds NaN or infinity"
    return f"its weights are, so it exceeds {str(module.dtype).removeprefix('torch.')}; another --dtype may do"


def _is_right_beside_another(draw: _Draw) -> bool:
    long, short = draw.run(WholeAttention(draw.window), [(0, draw.long, 0), (1, draw.short, 0)])
    return draw.equal(long, draw.long_alone) and draw.equal(short, draw.short_alone)


def _is_right_in_chunks(draw: _Draw) -> bool:
    memory = WholeAttention(draw.window)
    chunks = [draw.run(memory, [(0, draw.long[i : i + CHUNK], i)])[0] for i in range(0, LONG, CHUNK)]
    return draw.equal(torch.cat(chunks), draw.long_alone)


def _is_right_beside_the_last_position(draw: _Draw) -> bool:
    last = draw.shape.max_positions - 1
    short, _ = draw.run(WholeAttention(draw.window), [(0, draw.short, 0), (1, draw.short[:1], last)])
    return draw.equal(short, draw.short_alone)


_CHECKS = (
    ("eager", "its logits are not those under transformers' own eager attention", _equals_eager),
    ("two sequences", "a sequence changes the logits of the one flattened beside it", _is_right_beside_another),
    ("chunks", "a prompt in two chunks gives other logits than whole", _is_right_in_chunks),
    (
        "last position",
        "a row at the last position changes the rows beside it; a smaller --max-model-len may do",
        _is_right_beside_the_last_position,
    ),
)


class _Counting(TorchFunctionMode):
    """Notes whether anyone counts from 0 to `num_rows` - 1 inside the block."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self.counts_rows = False

    def __torch_function__(
        self, function: Any, _types: Any, arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if function is torch.arange and len(result) == self._num_rows:
            self.counts_rows = True
        return result


def _check_layer_types(body: Body, config: Any) -> None:
    kinds = strange_layer_types(config)
    if kinds:
        _refuse(body, "layer types", f"{', '.join(kinds)} is neither full nor sliding attention")


def _probe(body: Body, config: Any, max_positions: int) -> TransformersShape:
    """Run the whole model once and note what each layer asks of attention."""
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.v.new_zeros(*call.q.shape[:2], call.v.shape[-1])

    num_rows, num_runs = LONG + SHORT, body.num_runs
    ids = torch.arange(num_rows)
    with _named(body, "probe forward"), attending(attend), _one_by_one(body), _Counting(num_rows) as counting:
        logits = body.module(input_ids=ids[None], position_ids=ids[None], use_cache=False).logits
    if body.num_runs != num_runs + 1:
        _refuse(body, "probe forward", f"the whole model runs its body {body.num_runs - num_runs} times, not once")
    embedding: Any = body.module.get_input_embeddings()
    if logits.shape[-1] > len(embedding.weight):
        _refuse(body, "probe forward", f"it scores {logits.shape[-1]} tokens and embeds {len(embedding.weight)}")
    num_heads, num_kv_heads = _check_calls(body, config, calls, num_rows)
    if counting.counts_rows:
        _refuse(body, "positions", "it counts the rows of a step, whose positions in their requests are others")
    windows = tuple(call.window for call in calls)
    _check_windows(body, config, windows)
    return TransformersShape(
        num_layers=len(calls),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=max(size for call in calls for size in (call.q.shape[-1], call.v.shape[-1])),
        vocab_size=logits.shape[-1],
        max_positions=max_positions,
        windows=windows,
    )


def _check_calls(body: Body, config: Any, calls: Sequence[AttentionCall], num_rows: int) -> tuple[int, int]:
    """Return the (heads, K/V heads) of all layers."""
    num_layers = config.num_hidden_layers
    indexes = [index if call.layer is None else call.layer for index, call in enumerate(calls)]
    if indexes != list(range(num_layers)):
        _refuse(body, "call a layer", f"its {num_layers} layers called attention as {_shown(indexes)}")
    kinds = {(len(call.q), call.q.shape[1], call.k.shape[1], call.v.shape[1]) for call in calls}
    (rows, num_heads, num_kv_heads, num_values), *others = sorted(kinds)
    if others or rows != num_rows or num_values != num_kv_heads or num_heads % num_kv_heads:
        _refuse(body, "call a layer", f"of {num_rows} rows, layers have (rows, heads, keys, values) {sorted(kinds)}")
    return num_heads, num_kv_heads


def _check_windows(body: Body, config: Any, windows: tuple[int | None, ...]) -> None:
    """Check sizes; which layers have one is a matter of the eager check, where windows are narrowed."""
    asked = _window_of(body, config)
    for layer, window in enumerate(windows):
        if window is not None and (window != asked or not isinstance(window, int) or window < 1):
            _refuse(body, "windows", f"layer {layer} sees {window} positions, config.json has sliding_window {asked}")


def _window_of(body: Body, config: Any) -> Any:
    """Return the one window of a configuration; layers with windows of their own are refused."""
    with _named(body, "windows"):  # transformers raises where there is more than one
        return getattr(config, "sliding_window", None)


@contextlib.contextmanager
def _narrowed(body: Body, config: Any, max_positions: int) -> Iterator[int | None]:
    """Narrow the window that eager's masks have; yields the narrowed one, None where there is none.

    One that no position reaches beyond is left: it may be there to be ignored.
    """
    window = _window_of(body, config)
    if not isinstance(window, int) or window <= WINDOW or window >= max_positions:
        yield window
        return
    config.sliding_window = WINDOW
    try:
        yield WINDOW
    finally:
        config.sliding_window = window


@contextlib.contextmanager
def _eager(body: Body) -> Iterator[None]:
    body.module.set_attn_implementation("eager")
    try:
        yield
    finally:
        body.module.set_attn_implementation(ATTENTION_NAME)


@contextlib.contextmanager
def _one_by_one(body: Body) -> Iterator[None]:
    """Let experts run one after another: together, the library counts the rows sent to them, to put them in order."""
    chosen = body.module.get_experts_implementation()
    body.module.set_experts_implementation("eager")
    try:
        yield
    finally:
        body.module.set_experts_implementation(chosen)


def _tried(body: Body, name: str, check: Callable[[_Draw], bool], draw: _Draw) -> bool:
    with _named(body, name):
        return check(draw)


@contextlib.contextmanager
def _named(body: Body, check: str) -> Iterator[None]:
    """Refuse the module whose code raises inside the block, with the name of the check; a door for its errors."""
    try:
        yield
    except ModelError as error:
        _refuse(body, check, str(error))
    except Exception as error:
        _refuse(body, check, f"{type(error).__name__}: {error}", error)


def _refuse(body: Body, check: str, detail: str, cause: BaseException | None = None) -> NoReturn:
    name = type(body.module).__name__
    raise UnsupportedModel(
        f"{name} does not run rightly through transformers {transformers.__version__}: check '{check}' failed: {detail}"
    ) from cause


def _shown(indexes: Sequence[int]) -> str:
    shown = ", ".join(map(str, indexes[:12])) + (", …" if len(indexes) > 12 else "")
    return f"layers [{shown}], {len(indexes)} calls"
