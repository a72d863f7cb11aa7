"""A few seconds of `python -m fuzz http`, which people run for minutes."""

from __future__ import annotations

import pytest

from fuzz import http


@pytest.mark.slow
def test_five_seconds_of_rude_clients_hurt_nobody() -> None:
    assert http.run(minutes=5 / 60, seed=1) > 0
