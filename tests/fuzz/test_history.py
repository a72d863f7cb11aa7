from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import kv_cache, scheduler
from fuzz.history import History, Target, write_test

TARGETS = [scheduler.TARGET, kv_cache.TARGET]


def drawn(target: Target, number: int) -> History:
    return target.draw(random.Random(number), {})


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_history_reads_back_from_what_it_prints(target: Target) -> None:
    names = {kind.__name__: kind for kind in (target.settings, *target.operations)}
    for number in range(50):
        history = drawn(target, number)
        assert eval(repr(tuple(history)), names) == tuple(history)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_same_seed_draws_the_same_history_and_fixed_settings_are_kept(target: Target) -> None:
    assert drawn(target, 1) == drawn(target, 1) != drawn(target, 2)
    settings, _ = target.draw(random.Random(1), {"block_size": 4})
    assert (settings.block_size, settings.given()["block_size"]) == (4, 4)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_kind_of_operation_and_every_value_of_a_setting_is_drawn(target: Target) -> None:
    histories = [drawn(target, number) for number in range(400)]
    kinds = {type(operation) for _, operations in histories for operation in operations}
    assert kinds == set(target.operations)
    for name, values in target.settings.choices():
        assert {getattr(settings, name) for settings, _ in histories} == set(values)


@pytest.mark.parametrize("fault", [None, "the salt is not hashed"])
def test_a_history_is_written_as_a_test_formatted_like_all_code_that_runs(fault: str | None, tmp_path: Path) -> None:
    target = scheduler.TARGET if fault is None else kv_cache.TARGET
    history = drawn(target, 5)
    name, text = write_test(target, history, 'AssertionError: "a" is not\nwhat it must be' + " long" * 50, fault)
    path = tmp_path / name
    path.write_text(text)
    root = Path(__file__).parent.parent.parent
    config = ["--config", str(root / "pyproject.toml")]
    for command in (["format", "--check"], ["check", "--ignore", "D1"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *config, str(path)], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
    names: dict[str, object] = {}
    exec(compile(text, name, "exec"), names)
    test = names[path.stem]
    assert callable(test)
    if fault is None:
        test()


def test_long_settings_are_written_one_a_line() -> None:
    settings = scheduler.Settings(
        num_gpu_blocks_override=14, block_size=8, max_model_len=40, max_num_seqs=6, max_num_batched_tokens=26
    )
    _, text = write_test(scheduler.TARGET, History(settings, []), "")
    assert "    settings = Settings(\n        num_gpu_blocks_override=14,\n" in text
    assert "    operations = []\n" in text
    assert text.startswith('"""Kept."""\n')
