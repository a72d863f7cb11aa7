"""What a layer needs of attention: K/V pages that someone else owns, and one call a layer.

A backend owns the pages, `[num_blocks, block_size, num_kv_heads, head_dim]` a layer for keys and for values. It writes
a step's keys and values through the slot mapping before any row attends, so rows of one plan may share blocks that
this plan fills.

Promise of every backend: what a row gets depends, bit for bit, on its own query, its position and the K/V before it,
never on the other rows, on where a chunk begins, or on which blocks hold the K/V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.outputs import TokenArray


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request's rows of a step.

    Attributes:
        first_row: Index of its first row among the step's rows.
        num_rows: How many rows, at least 1; they are consecutive positions.
        start: Position of the first row; the K/V of everything before it is in the pages.
        block_tables: For each group of layers its block ids, `[num_blocks]`, covering `start + num_rows` positions. A
            block that lies before every window of these rows may be the null block.
    """

    first_row: int
    num_rows: int
    start: int
    block_tables: Sequence[TokenArray]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where a step's rows belong; made by `model_runner.input_batch`.

    Attributes:
        requests: In row order, without gaps.
    """

    requests: Sequence[RequestRows]

    def slot_mappings(self, block_size: int) -> list[torch.Tensor]:
        """Return for each group of layers the slots that the rows' K/V goes to, int64 `[num_rows]`.

        A slot is block id x block size + offset.
        """
        groups: list[list[np.ndarray]] = [[] for _ in self.requests[0].block_tables]
        for request in self.requests:
            span = np.arange(request.start, request.start + request.num_rows)
            for group, table in zip(groups, request.block_tables, strict=True):
                group.append(table[span // block_size].astype(np.int64) * block_size + span % block_size)
        return [torch.from_numpy(np.concatenate(group)) for group in groups]


class AttentionPages(Protocol):
    """Pages and what is laid out for them once a step: what the model runner needs of a backend."""

    @property
    def size_bytes(self) -> int:
        """Memory of the pages; 0 once they are released."""
        ...

    def release_pages(self) -> None:
        """Give the pages' memory back; nothing can be attended to any more."""
        ...

    def clear_null_block(self) -> None:
        """Make the null block's pages zero, after a step that wrote there: masked keys may be read from it."""
        ...

    def prepare(self, batch: AttentionBatch) -> Any:
        """Compute once a step what all its layers need; the result is what the model's `forward` takes as `batch`."""
        ...


class AttentionBackend(AttentionPages, Protocol):
    """Attention over pages, called by each layer."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        batch: Any,
    ) -> torch.Tensor:
        """Write this step's keys and values, then let each row attend to the positions up to its own.

        Args:
            layer: Index of the layer.
            q: Queries after rotary, `[num_rows, num_heads, head_dim]`; heads `[i * group, (i + 1) * group)` read
                K/V head i.
            k: Keys after rotary, `[num_rows, num_kv_heads, head_dim]`.
            v: Values, like `k`.
            scale: Factor of the scores.
            window: Positions a row sees, its own included; None for all.
            softcap: Bound of the scores by tanh; None for none.
            sinks: A logit a head that takes part in the softmax and yields nothing; None for none.
            batch: What `prepare` returned for this step.

        Returns:
            `[num_rows, num_heads, head_dim]`, in the type of `q`.
        """
        ...
