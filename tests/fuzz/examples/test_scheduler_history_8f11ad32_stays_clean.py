"""While plans held the blocks of who had made way, those who went on took the free ones."""

from __future__ import annotations

from fuzz.history import replay
from fuzz.scheduler import Add, Finish, Plan, Settings, Simulation


def test_scheduler_history_8f11ad32_stays_clean() -> None:
    settings = Settings(block_size=2, max_model_len=6, max_num_seqs=2, scheduling_policy="fair", max_concurrent_plans=2)
    operations = [
        Add(max_tokens=5, client=1),
        Add(max_tokens=5),
        Add(),
        Add(client=1),
        Finish(),
        Plan(corrupts=0),
    ]
    replay(Simulation(settings), operations)
