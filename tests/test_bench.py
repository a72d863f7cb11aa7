"""`bench` as a person runs it, on the integer model: tables, the same figures as JSON, Ctrl-C, nothing left."""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import trio

import engine
from engine.bench.abort import Cuts, abort
from engine.bench.forms import FORMS
from engine.bench.http_client import Address
from engine.bench.latency import latency
from engine.bench.perplexity import perplexity
from engine.bench.plot import Panel, draw
from engine.bench.profile import StepProfile
from engine.bench.report import Report
from engine.bench.steps import Curve, add_steps
from engine.bench.structured import Measured, structured
from engine.bench.throughput import throughput
from engine.bench.workload import StreamTimes, Workload
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.null import expected_tokens
from engine.llm_engine import LLMEngine

ROOT = Path(__file__).parent.parent
MODULE = [sys.executable, "-m", "engine", "bench"]
TIMEOUT_S = 60
SHORT = ["--input-len", "8", "--output-len", "4"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MODULE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


# -- parts ------------------------------------------------------------------------------------------------------------


def test_a_seed_fixes_the_prompts() -> None:
    workload = Workload(3, 5, 7, seed=1)
    assert workload.prompts(256) == workload.prompts(256) != workload._replace(seed=2).prompts(256)
    assert [len(prompt) for prompt in workload.prompts(256)] == [5, 5, 5]
    assert all(1000 <= token_id < 32000 for prompt in workload.prompts(32000) for token_id in prompt)


def test_a_report_shows_people_and_programs_the_same_figures() -> None:
    report = Report("one", {"num_streams": 2})
    report.add("output_throughput", 12.5, "tokens/s")
    report.add_times("whole_answer", [0.001, 0.003])
    report.add_times("none_came", [])
    assert report.as_json() == {
        "bench": "one",
        "settings": {"num_streams": 2},
        "figures": {"output_throughput_tokens_per_s": 12.5},
        "times": {
            "whole_answer": {"mean_ms": 2.0, "p50_ms": 2.0, "p90_ms": 2.8, "p99_ms": pytest.approx(2.98), "max_ms": 3.0}
        },
    }
    shown = report.render()
    assert "output throughput  12.5 tokens/s" in shown
    assert shown.splitlines()[-1].split() == ["whole", "answer", "2", "2", "2.8", "2.98", "3"]


def test_the_times_of_a_stream_are_taken_apart() -> None:
    times = StreamTimes()
    stream = times.open(1.0)
    for now_s in (2.0, 2.5, 4.0):
        stream.add(now_s)
    stream.close(5)  # one arrival brought several tokens
    assert (times.first_token_s, times.inter_token_s, times.per_token_s) == ([1.0], [0.5, 1.5], [0.5])
    assert (times.whole_s, times.num_tokens) == ([3.0], 5)


@pytest.mark.parametrize("url", ["", "localhost:8000", "https://localhost", "http://", "http://h:99999"])
def test_only_http_addresses_are_taken(url: str) -> None:
    with pytest.raises(ConfigError, match="--url must be like"):
        Address.of(url)
    assert Address.of("http://host:80/base/") == ("host", 80, "/base")


def test_profiling_changes_no_token_and_leaves_no_timer() -> None:
    llm = engine.LLM("null", max_num_seqs=4)
    workload, profile = Workload(6, 20, 10, seed=3), StepProfile()
    with profile.measure(llm):
        outputs = llm.generate(workload.prompts(256), workload.params(), use_tqdm=False)
    expected = [expected_tokens(prompt, workload.params(), 10) for prompt in workload.prompts(256)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for part in (llm.client.core, llm.client, llm.client.runner):
        assert not {"plan", "commit", "peek_output", "execute"} & vars(part).keys()
    rows = profile.table().rows
    parts = [row for name, row in rows.items() if name != "total" and not name.startswith("beside")]
    assert sum(row[1] for row in parts) == pytest.approx(100)
    assert all(row[0] >= 0 for row in rows.values())
    assert 0 < profile.python_share() < 100


def test_the_cost_of_logprobs_is_measured_against_runs_without(
    byte_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent_s, generate = 0.0, engine.LLM.generate

    def timed(llm: engine.LLM, prompts: Any, params: engine.SamplingParams, use_tqdm: bool) -> list[Any]:
        nonlocal spent_s
        spent_s += 2.0 if params.logprobs is None else 3.0
        outputs = generate(llm, prompts, params, use_tqdm)
        assert all((output.outputs[0].logprobs is None) == (params.logprobs is None) for output in outputs)
        assert not any(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(engine.LLM, "generate", timed)
    monkeypatch.setattr(
        "engine.bench.throughput.time", SimpleNamespace(process_time=lambda: spent_s, perf_counter=time.perf_counter)
    )
    config = EngineConfig(model=str(byte_llama), num_threads=1, num_gpu_blocks_override=64, max_model_len=128)
    report = throughput(config, Workload(2, 40, 3, seed=0), is_profiled=False, num_logprobs=20).as_json()
    assert report["settings"]["logprobs"] == 20
    assert report["figures"]["logprobs_in_processor_time_percent"] == 50
    assert spent_s == 3 + 2 * (2 + 3)


def test_no_stream_of_bench_latency_finds_its_prompt_in_the_cache(tmp_path: Path) -> None:
    config = EngineConfig(model="null", log_level="warning", profile_dir=str(tmp_path))
    assert trio.run(latency, config, Workload(2, 64, 2, seed=0), True, trio.Event()) is not None
    (trace,) = tmp_path.iterdir()
    steps = [event["args"] for event in json.loads(trace.read_bytes())["traceEvents"] if event["cat"] == "steps"]
    assert [step["num_tokens"] for step in steps if step.get("num_requests")] == [64, 1] * 2


def test_what_forms_cost_is_measured_as_a_part_of_each_step_and_nothing_of_it_is_left() -> None:
    config = EngineConfig(model="null", max_num_seqs=3)
    report = structured(config, Workload(5, 4, 30, seed=0), "mix").as_json()
    row = report["structured"]["mix"]
    assert 0 < row["of_process_%"] < row["of_steps_%"] < 100
    assert 5 < row["tokens"] <= 5 * 30
    assert 1 < row["rows_a_step"] <= 3
    engine_ = LLMEngine(model="null")
    run = Measured(engine_, Workload(2, 4, 9, seed=0), FORMS["uuid"])
    assert (run.num_accepts, run.num_masks) == (18, 18)
    for part in (engine_.client, engine_.client.core):
        assert not {"peek_output", "set_grammar"} & vars(part).keys()


def test_the_perplexity_of_a_text_is_what_its_tokens_logprobs_give(byte_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    report = perplexity(EngineConfig(model=str(byte_llama), num_threads=1), text, 150).as_json()["figures"]
    with engine.LLM(str(byte_llama), num_threads=1) as llm:
        windows = [llm.tokenizer.encode(text.read_text())[:150]]
        (output,) = llm.generate(windows, engine.SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert report["perplexity"] == pytest.approx(math.exp(-output.prompt_logprobs.logprobs[:, 0].mean()), rel=1e-5)
    with pytest.raises(ConfigError, match="cannot be read"):
        perplexity(EngineConfig(model=str(byte_llama)), tmp_path / "none", 10)


def test_the_line_through_points_is_theirs_where_they_lie_on_one() -> None:
    assert Curve([1, 2, 5], [3.0, 5.0, 11.0]).line() == pytest.approx((1.0, 2.0))
    assert Curve([7], [3.0]).line() == (3.0, 0.0)
    off = Curve([1, 2, 3], [1.0, 2.0, 1.0]).table("token").rows
    assert list(off) == ["1_tokens", "2_tokens", "3_tokens"]
    for median_ms, line_ms, percent in off.values():
        assert percent == pytest.approx(100 * (median_ms - line_ms) / median_ms)


def test_a_plot_has_every_point_in_its_panel_and_axes_from_0_in_round_numbers() -> None:
    points = [(1, 2.0), (30, 3.5), (64, 8.3)]
    panels = [Panel("by <this>", "request", points, (1.5, 0.1)), Panel("flat", "token", [(17, 0.04)], (0.04, 0.0))]
    svg = ElementTree.fromstring(draw("one & all", panels))
    name = "{http://www.w3.org/2000/svg}"
    width, height = int(svg.get("width", "")), int(svg.get("height", ""))
    many, one = svg.findall(f"{name}g")
    assert [len(panel.findall(f"{name}circle")) for panel in (many, one)] == [3, 1]
    for circle in svg.iter(f"{name}circle"):
        assert 0 < float(circle.get("cx", "")) < width / 2
        assert 0 < float(circle.get("cy", "")) < height
    texts = [text.text for text in many.findall(f"{name}text")]
    assert texts[0] == "by <this>"
    assert {"0", "10", "70", "2", "8", "requests", "ms a step"} <= set(texts)


@pytest.mark.parametrize("model", ["null", "real"])
def test_steps_are_timed_by_context_and_by_requests(model: str, byte_llama: Path) -> None:
    settings: dict[str, Any] = {"model": "null", "null_step_ms": 0.5} if model == "null" else {"model": str(byte_llama)}
    config = EngineConfig(max_num_seqs=3, max_model_len=64, num_gpu_blocks_override=40, num_threads=1, **settings)
    report = Report("steps", {})
    panels = add_steps(report, config, Workload(1, 40, 1, seed=0))
    tables = report.as_json()
    assert list(tables["step_by_context"]) == ["17_tokens", "33_tokens", "49_tokens"]
    assert list(tables["step_by_requests"]) == ["1_requests", "2_requests", "3_requests"]
    for name in ("step_by_context", "step_by_requests"):
        assert all(row["median_ms"] > config.null_step_ms for row in tables[name].values())
    assert panels[1].title == "33 tokens of context, by requests"
    assert [[x for x, _ in panel.points] for panel in panels] == [[17, 33, 49], [1, 2, 3]]


# -- whole ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "figures", "tables"),
    [
        ("throughput", ["--num-prompts", "4"], ["output_throughput_tokens_per_s"], []),
        ("latency", ["--num-prompts", "2"], ["output_throughput_tokens_per_s"], ["times"]),
        ("serve", ["--num-prompts", "6", "--num-streams", "3"], ["output_throughput_tokens_per_s"], ["times"]),
        (
            "abort",
            ["--num-streams", "4", "--max-num-seqs", "3", "--rounds", "2", "--within-ms", "50"],
            ["cuts", "departures", "bursts", "all_leave_seen_to_free_p99_in_steps"],
            ["times"],
        ),
    ],
)
def test_each_bench_prints_a_table_and_writes_json(
    name: str, flags: list[str], figures: list[str], tables: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    file.write_text("an earlier report")
    result = run(name, "null", *flags, *SHORT, "--json", str(file))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"bench {name}: model null")
    report = json.loads(file.read_text())
    assert report["bench"] == name
    assert all(report["figures"][figure] > 0 for figure in figures)
    assert all(report[table] for table in tables)


def with_wide_heads(byte_llama: Path, folder: Path) -> Path:
    """Return its like with heads of 16 numbers, as the operations in C want them."""
    import transformers

    shutil.copytree(byte_llama, folder)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.LlamaConfig.from_pretrained(byte_llama, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["throughput", "latency"])
def test_a_profile_is_a_table_and_a_chrome_trace_of_the_same_times(name: str, byte_llama: Path, tmp_path: Path) -> None:
    model = with_wide_heads(byte_llama, tmp_path / "model")
    file, folder = tmp_path / "report.json", tmp_path / "new" / "traces"
    limits = ["--num-prompts", "3", "--num-gpu-blocks-override", "64", "--max-model-len", "128", "--num-threads", "1"]
    flags = ["--profile", "--profile-dir", str(folder), "--json", str(file)]
    result = run(name, str(model), *SHORT, *limits, *flags)
    assert (result.returncode, result.stderr) == (0, "")
    (trace,) = folder.iterdir()
    assert f"trace: {trace}, for chrome://tracing or ui.perfetto.dev" in result.stdout
    report = json.loads(file.read_text())
    assert report["files"] == {"trace": str(trace)}
    events = json.loads(trace.read_text())["traceEvents"]
    assert all({"name", "cat", "ph", "pid", "tid", "args"} <= event.keys() for event in events)
    num_steps = sum(event["cat"] == "steps" and event["args"].get("num_requests", 0) > 0 for event in events)
    assert num_steps == {"throughput": 4, "latency": 12}[name]
    spent_us: Counter[str] = Counter()
    for event in events:
        if event["ph"] == "X" and event["cat"] == "runner":
            spent_us[event["name"]] += event["dur"]
    assert {"flatten", "linear", "attend", "logits", "sample"} <= spent_us.keys()
    for part, time_us in spent_us.items():
        assert report["step"][part]["ms_a_step"] == pytest.approx(time_us / 1000 / num_steps), part
    assert report["step"]["total"]["ms_a_step"] > sum(spent_us.values()) / 1000 / num_steps


@pytest.mark.slow
async def test_the_abort_bench_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.bench.abort.MEASURED_S", 0.0)
    with trio.fail_after(60):
        report = await abort(EngineConfig(model="null", log_level="warning"), None, Cuts(2, 1000, 0.01, 0), 4, 4)
    figures = report.as_json()["figures"]
    assert (figures["cuts"], figures["departures"], figures["bursts"]) == (2, 1, 1)
    assert figures["answer_after_the_cuts_ms"] > 0


@pytest.mark.slow
def test_throughput_plots_the_time_of_a_step(tmp_path: Path) -> None:
    plot, file = tmp_path / "steps.svg", tmp_path / "report.json"
    plot.write_text("an earlier plot, longer than nothing")
    limits = ["--max-model-len", "99", "--max-num-seqs", "40", "--num-prompts", "2"]
    result = run("throughput", "null", *SHORT, *limits, "--plot", str(plot), "--json", str(file))
    assert (result.returncode, result.stderr) == (0, "")
    assert ElementTree.fromstring(plot.read_text()).tag.endswith("svg")
    report = json.loads(file.read_text())
    assert list(report["step_by_requests"])[::32] == ["1_requests", "40_requests"]
    assert {f"{i}_tokens" for i in (17, 33, 49, 65, 81)} == report["step_by_context"].keys()
    assert "81 tokens" in result.stdout


@pytest.mark.slow
def test_the_transport_is_measured_without_a_model(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = run("transport", "--num-messages", "20", "--json", str(file))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("bench transport: num messages 20")
    report = json.loads(file.read_text())
    assert report["figures"]["small_messages_messages_per_s"] == report["one_way"]["100_B"]["messages_per_s"] > 0
    assert all(figure > 0 for row in report["one_way"].values() for figure in row.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "null", "--logprobs", "21"], "logprobs must be from 0 to 20, got 21"),
        (["throughput", "null", "--structured", "json", "--profile"], "leave out --profile, --plot and --logprobs"),
        (["throughput", "null", "--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["throughput", "null", "--json", "no/such/folder"], "--json no/such/folder cannot be written"),
        (["throughput", "null", "--plot", "no/such/folder"], "--plot no/such/folder cannot be written"),
        (["latency", "null", "--profile", "--profile-dir", "README.md"], "--profile-dir README.md cannot be written"),
        (["latency", "null", "--profile", "--data-parallel-size", "2"], "--profile is of one engine"),
        (
            ["throughput", "null", "--plot", os.devnull, "--max-model-len", "26", *SHORT],
            "--plot needs a context of 27 tokens, --max-model-len is 26",
        ),
        (["throughput", "null", "--input-len", "9000"], "the prompt has 9000 tokens"),
        (["serve", "null", "--max-model-len", "10"], "the server answered 400"),
        (["transport", "--num-messages", "1"], "--num-messages must be at least 2, got 1"),
        (["serve", "no-such-model"], "unknown model 'no-such-model'"),
        (["serve", "--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["serve", "--url", "http://127.0.0.1:1", "--max-num-seqs", "3"], "--max-num-seqs cannot be given with --url"),
    ],
)
def test_a_wrong_bench_exits_2_with_a_clear_last_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.fixture
def start() -> Iterator[Any]:
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", *arguments],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_running_server_is_measured_and_left_running(start: Any) -> None:
    server = start("serve", "null", "--port", "0")
    url = next(line.split(" on ")[1].split()[0] for line in server.stderr if "ready: " in line)
    result = run("serve", "--url", url, "--num-prompts", "4", "--num-streams", "2", *SHORT)
    assert result.returncode == 0, result.stderr
    assert run("abort", "--url", url, "--num-streams", "4", "--rounds", "1", "--within-ms", "20").returncode == 0
    assert urllib.request.urlopen(url + "/health", timeout=10).status == 200


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children for each in descendants(child)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "num_descendants"),
    [
        ("throughput", ["--num-prompts", "2"], 0),
        ("latency", ["--num-prompts", "2"], 2),  # the engine and its reaper
        ("serve", ["--num-prompts", "2"], 4),  # the server, its engine, and their reapers
        ("abort", ["--rounds", "1000"], 4),
    ],
)
def test_ctrl_c_ends_a_bench_with_130_no_traceback_and_nothing_left(
    name: str, flags: list[str], num_descendants: int
) -> None:
    terminal, side = os.openpty()  # a bar is drawn on terminals alone; it tells that the bench is under way
    termios.tcsetwinsize(side, (40, 100))
    flags = [*flags, "--null-step-ms", "2", "--output-len", "2000"]
    process = subprocess.Popen([*MODULE, name, "null", *flags], cwd=ROOT, stderr=side, stdout=subprocess.DEVNULL)
    os.close(side)
    try:
        shown = ""
        while "0%" not in shown:
            more = _read(terminal)
            assert more, shown
            shown += more
        pidfds = [os.pidfd_open(pid) for pid in descendants(process.pid)]
        process.send_signal(signal.SIGINT)
        while more := _read(terminal):
            shown += more
        assert process.wait(TIMEOUT_S) == 130, shown
        assert "Traceback" not in shown
        assert len(pidfds) == num_descendants
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 5.0)[0], "a process outlived its bench"
            os.close(pidfd)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def _read(terminal: int) -> str:
    """Return what is shown next, nothing at the end."""
    assert select.select([terminal], [], [], TIMEOUT_S)[0], "nothing is shown any more"
    try:
        return os.read(terminal, 4096).decode()
    except OSError:  # nobody has the other side any more
        return ""
