"""Any causal language model of transformers, with attention over our pages in place of its own.

transformers lets an *attention function* be registered by name. Ours gets each layer's queries, keys and values after
rotary, and hands them to whoever runs the forward (`attending`). All rows of a step go in as one flat sequence,
`input_ids [1, num_rows]` with their `position_ids`; no cache object, no mask::

    token_ids [T] → embedding → layer 0 → layer 1 → … → body's output [T, dim]     forward
                                   └─ q, k, v ─▶ attention function ─▶ AttentionBackend
    hidden[rows] → whatever the model does after its body → logits                 logits

The batch is bound around the forward, for keyword arguments do not reach the attention of every architecture. What
cannot be run so is found out by `models.guard`, not here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from engine.attention.base import AttentionBackend
from engine.errors import UnsupportedModel

ATTENTION_NAME = "metronome"
"""The name of our attention function in transformers; it has no mask function, so that no masks are made."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """What one layer asks of attention.

    Attributes:
        layer: The index that the layer says it has; None where it does not say.
        q: `[num_rows, num_heads, head_dim]`, after rotary.
        k: `[num_rows, num_kv_heads, head_dim]`, after rotary.
        v: `[num_rows, num_kv_heads, value_dim]`.
        scale: Factor of the scores.
        window: Positions a row sees, its own included; None for all.
        softcap: Bound of the scores by tanh; None for none.
        sinks: A logit a head that takes part in the softmax and yields nothing; None for none.
    """

    layer: int | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


Attend = Callable[[AttentionCall], torch.Tensor]
"""Answers a call with `[num_rows, num_heads, value_dim]`."""
_attend: ContextVar[Attend] = ContextVar("attend")


@contextlib.contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Let `attend` answer the layers of every forward inside the block."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Answer one layer of a model; all tensors are `[1, heads, num_rows, head_dim]`, the result has rows first."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedModel(
            f"a layer attends with queries {list(query.shape)} over keys {list(key.shape)}: not row for row"
        )
    call = AttentionCall(
        layer=getattr(module, "layer_idx", None),
        q=query[0].transpose(0, 1),
        k=key[0].transpose(0, 1),
        v=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return _attend.get()(call)[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_function)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersShape:
    """A `ModelShape`, found by running the model; see `models.guard`."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    windows: tuple[int | None, ...]


class TransformersModel:
    """A loaded module of transformers as a `Model`."""

    def __init__(self, body: Body, shape: TransformersShape) -> None:
        """Run `body`, whose module must attend under `ATTENTION_NAME`; `shape` is what the guard found."""
        self.operation_seconds: dict[str, float] = {}
        self.config = shape
        self._body = body
        self._backend: AttentionBackend | None = None

    def use_attention(self, backend: AttentionBackend) -> None:
        """Attend through `backend` from now on; the model does not own it."""
        self._backend = backend

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """See `Model.forward`."""
        assert self._backend is not None
        backend, layers, head_dim = self._backend, itertools.count(), self.config.head_dim

        def attend(call: AttentionCall) -> torch.Tensor:
            q, k, v = (F.pad(part, (0, head_dim - part.shape[-1])) for part in (call.q, call.k, call.v))
            result = backend.attend(next(layers), q, k, v, call.scale, call.window, call.softcap, call.sinks, batch)
            return result[..., : call.v.shape[-1]]

        with attending(attend):
            return self._body.hidden(token_ids, positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self._body.logits(hidden)


class Body:
    """The two halves of a causal language model: the body with all layers, and what the model does after it.

    What comes after is more than the head (scales, soft caps, a cut of padding), so it is not rebuilt: the whole model
    runs once more, with its body answering what it is told.

    Attributes:
        module: The whole model.
        num_runs: How often the body has run.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """Split `module`; its body's `forward` is replaced by one that can be told its answer."""
        self.module = module
        self.num_runs = 0
        self._body: Any = _body_of(module)
        self._run = self._body.forward
        self._body.forward = self._answer
        self._told: Any = None
        self._output_type: Any = None

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the body over `[num_rows]` tokens; returns `[num_rows, hidden_size]`."""
        output = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        self._output_type = type(output)
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run what comes after the body over rows that `hidden` gave; returns float32 `[n, vocab_size]`."""
        self._told = self._output_type(last_hidden_state=hidden[None])
        try:
            token_ids = torch.zeros(1, len(hidden), dtype=torch.int64)
            return self.module(input_ids=token_ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]
        finally:
            self._told = None

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        if self._told is not None:
            return self._told
        self.num_runs += 1
        return self._run(*args, **kwargs)


def _body_of(module: PreTrainedModel) -> PreTrainedModel:
    """Return the innermost model inside `module` that holds its input embedding."""
    embedding = module.get_input_embeddings()
    inner = [part for part in module.modules() if isinstance(part, PreTrainedModel) and part is not module]
    holders = [part for part in inner if any(held is embedding for held in part.modules())]
    if not holders:
        raise UnsupportedModel(f"{type(module).__name__} has no body with an embedding that could be run by itself")
    return min(holders, key=lambda part: sum(1 for _ in part.modules()))
