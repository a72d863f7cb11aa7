"""Found with seed 1: AssertionError: r2 did not get the token that its row sampled."""

from __future__ import annotations

from fuzz.history import replay
from fuzz.scheduler import Add, Finish, Plan, Settings, Simulation


def test_scheduler_history_3310c840_stays_clean() -> None:
    settings = Settings(
        num_gpu_blocks_override=4,
        block_size=2,
        max_model_len=8,
        max_num_seqs=2,
        max_concurrent_plans=3,
    )
    operations = [
        Add(length=19, max_tokens=2),
        Plan(),
        Finish(),
        Plan(),
        Plan(),
        Add(length=4),
        Plan(),
        Finish(),
        Finish(),
        Add(length=21),
        Plan(),
        Finish(culprit=0),
    ]
    replay(Simulation(settings), operations)
