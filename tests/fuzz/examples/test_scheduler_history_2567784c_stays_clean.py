"""Found with seed 1: AssertionError: block 0 is hit under a hash that is not its own."""

from __future__ import annotations

from fuzz.history import replay
from fuzz.scheduler import Add, Finish, Plan, Resize, Settings, Simulation


def test_scheduler_history_2567784c_stays_clean() -> None:
    settings = Settings(max_model_len=5, max_num_seqs=2, windows=(None, 1), max_concurrent_plans=3)
    operations = [
        Resize(num_blocks=13),
        Add(max_tokens=2),
        Plan(),
        Plan(),
        Add(max_tokens=5),
        Finish(),
        Plan(),
        Finish(),
        Plan(),
        Plan(),
        Finish(),
        Finish(),
        Finish(),
    ]
    replay(Simulation(settings), operations)
