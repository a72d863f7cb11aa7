"""What Hypothesis draws for the targets; everything here shrinks towards the plainest history."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from engine.protocol import PauseMode
from fuzz.scheduler import Abort, Add, Finish, Operation, Pause, Plan, Reset, Resume


@st.composite
def settings(draw: st.DrawFn, max_depth: int = 4) -> dict[str, Any]:
    """Draw a tiny engine whose pool is under pressure; up to `max_depth` plans in flight."""
    num_blocks = draw(st.integers(3, 12))
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_model_len = draw(st.integers(2, num_blocks * block_size))
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    return {
        "num_gpu_blocks_override": num_blocks,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(max_num_seqs, draw(st.integers(1, 16)), 0 if chunked else max_model_len),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.integers(0, 3)) if chunked else 0,
        "max_concurrent_plans": draw(st.integers(1, max_depth)),
    }


_adds = st.builds(
    Add,
    prefix=st.integers(0, 2),
    length=st.integers(1, 20),
    max_tokens=st.none() | st.integers(1, 8),
    min_tokens=st.sampled_from([0, 3]),
    stops=st.booleans(),
    salt=st.integers(0, 1),
    seed=st.none() | st.just(7),
    reuses_name=st.booleans(),
)
_steps = st.sampled_from([Plan(), Finish()])
_faults = st.sampled_from([Plan(fails=True), *(Finish(culprit) for culprit in range(3))])
_interruptions = st.one_of(
    st.builds(Abort, index=st.integers(0, 8), by_stop_string=st.booleans()),
    st.builds(Pause, mode=st.sampled_from(PauseMode)),
    st.just(Resume()),
    st.builds(Reset, reset_running=st.booleans()),
)

operations: st.SearchStrategy[Operation] = st.one_of(_steps, _steps, _adds, _interruptions, _faults)
"""One operation of a history."""
histories: st.SearchStrategy[list[Operation]] = st.lists(operations, max_size=60)
"""A whole history."""
