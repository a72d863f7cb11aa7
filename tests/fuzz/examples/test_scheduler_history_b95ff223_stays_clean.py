"""Found with seed 1: AssertionError: Request(r2 RUNNING computed=3/3+1): table and view differ."""

from __future__ import annotations

from fuzz.history import replay
from fuzz.scheduler import Add, Plan, Settings, Simulation


def test_scheduler_history_b95ff223_stays_clean() -> None:
    settings = Settings(
        num_gpu_blocks_override=10,
        max_model_len=5,
        max_num_seqs=2,
        scheduling_policy="fair",
        windows=(None, 1),
        max_concurrent_plans=2,
    )
    operations = [
        Add(client=2),
        Plan(),
        Add(length=2, max_tokens=2, client=2),
        Add(max_tokens=5),
    ]
    replay(Simulation(settings), operations)
