from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import driver, history, kv_cache, scheduler
from fuzz.__main__ import TARGETS, main
from fuzz.faults import planted
from fuzz.history import Target

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TARGETS.keys() - {"faults"}))
def test_every_target_runs_from_a_seed_and_says_what_it_did(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert TARGETS[name](0.001, 1) > 0
    assert capsys.readouterr().out.startswith(f"{name}: ")


def test_a_clean_run_ends_with_its_rate_and_its_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    num_steps = driver.run(scheduler.TARGET, 0.005, 3)
    out = capsys.readouterr().out
    assert f" {num_steps} steps in " in out
    assert re.search(r" steps/s, \d+ per CPU second, clean\n", out)
    assert re.search(r"^WAITING → .*RUNNING [1-9]", out, re.MULTILINE)


def test_progress_is_told_while_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(driver, "PROGRESS_INTERVAL_S", 0.0)
    driver.run(kv_cache.TARGET, 0.002, 3)
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("kv_cache: 1 histories, ")
    assert first.endswith("pairs of status and event")


@pytest.mark.parametrize("target", [scheduler.TARGET, kv_cache.TARGET], ids=lambda target: target.name)
def test_what_breaks_a_promise_is_shrunk_printed_as_a_test_and_kept(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "EXAMPLES", tmp_path)
    with planted("a reference is not dropped"), pytest.raises(SystemExit) as exit_info:
        driver.run(target, 1.0, 3)
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() in captured.out
    assert "AssertionError: references" in captured.err
    names: dict[str, object] = {}
    exec(compile(kept.read_text(), kept, "exec"), names)
    test = names[kept.stem]
    assert callable(test)
    test()
    with planted("a reference is not dropped"), pytest.raises(AssertionError, match="references"):
        test()


def test_a_broken_promise_ends_the_program_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "EXAMPLES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fuzz", "kv_cache", "--minutes", "1", "--seed", "4"])
    with planted("evicted blocks keep their hash"), pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1


@pytest.mark.slow
def test_a_policy_may_be_fixed() -> None:
    command = [sys.executable, "-m", "fuzz", "scheduler", "--minutes", "0.001", "--policy", "fcfs"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "clean" in result.stdout


@pytest.mark.parametrize("arguments", [["kv_cache", "--policy", "fcfs"], ["scheduler", "--record"]])
def test_an_option_of_another_target_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2


def test_examples_are_kept_where_the_test_command_finds_them() -> None:
    assert (ROOT / history.EXAMPLES).is_dir()
