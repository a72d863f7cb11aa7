from __future__ import annotations

import pytest

from engine.request import Request, RequestStatus
from fuzz.coverage import LEGAL_MOVES, Coverage
from fuzz.scheduler import Abort, Add, Finish, Plan, Settings, Simulation


def test_events_are_counted_by_the_status_of_the_requests_that_see_them() -> None:
    coverage = Coverage()
    simulation = Simulation(Settings(max_num_seqs=1), coverage)
    for operation in (Abort(), Add(), Plan(), Add(), Plan(), Abort(), Finish(), Abort()):
        simulation.apply(operation)
    assert coverage.events == {
        ("abort", "UNKNOWN"): 1,
        ("plan", "WAITING"): 1,  # the second one makes no plan: one is in flight
        ("add", "RUNNING"): 1,
        ("abort", "RUNNING"): 1,
        ("commit", "WAITING"): 1,
        ("abort", "ENDED"): 1,
    }


def test_moves_are_counted_while_they_are_recorded_and_only_then() -> None:
    coverage, move_to = Coverage(), Request.move_to
    with coverage.recording_moves():
        simulation = Simulation(Settings())
        simulation.apply(Add())
        simulation.apply(Plan())
        simulation.finish()
    assert coverage.moves == {
        (RequestStatus.WAITING, RequestStatus.RUNNING): 1,
        (RequestStatus.RUNNING, RequestStatus.FINISHED_LENGTH_CAPPED): 1,
    }
    assert coverage.missing_moves == LEGAL_MOVES - coverage.moves.keys()
    assert Request.move_to is move_to


def test_the_report_says_which_events_and_moves_came_how_often_and_which_moves_never() -> None:
    coverage = Coverage()
    coverage.saw("plan", [RequestStatus.WAITING, RequestStatus.RUNNING])
    coverage.moves[RequestStatus.WAITING, RequestStatus.RUNNING] = 7
    lines = coverage.report().splitlines()
    assert lines[0].split() == ["event", "RUNNING", "WAITING"]
    assert lines[1].split() == ["plan", "1", "1"]
    (waiting,) = (line for line in lines if line.startswith("WAITING →"))
    assert "RUNNING 7" in waiting
    assert "FINISHED_ABORTED NEVER" in waiting
    assert lines[-1] == f"not taken: {len(LEGAL_MOVES) - 1} of {len(LEGAL_MOVES)}"
    assert coverage.summary().startswith(f"1/{len(LEGAL_MOVES)} moves")


def test_a_move_against_the_table_still_raises_while_moves_are_recorded() -> None:
    simulation = Simulation(Settings())
    simulation.apply(Add())
    (request,) = simulation.driver.live_requests
    with Coverage().recording_moves(), pytest.raises(RuntimeError, match="cannot become"):
        request.move_to(RequestStatus.PREEMPTED)
