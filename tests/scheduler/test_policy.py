from __future__ import annotations

from typing import get_args

from engine.config import SchedulingPolicy
from engine.scheduler.policy import POLICIES


def test_the_setting_offers_exactly_the_policies_there_are() -> None:
    assert set(get_args(SchedulingPolicy)) == set(POLICIES)
