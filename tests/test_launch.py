"""Engines in a thread and in a process, driven through `open_engine` with the null model: real threads and sockets."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import engine
from engine.client.async_llm import AsyncLLM
from engine.client.asynchronous import AsyncMPClient
from engine.config import EngineConfig
from engine.errors import Cause, ConfigError, EngineDeadError, InvalidRequest, PromptTooLong, QueueFull
from engine.launch import _MemoryConnection
from engine.outputs import FinishReason
from engine.protocol import EngineDead, EngineReady, EngineStopped
from engine.sampling_params import OutputKind, SamplingParams
from engine.testing import expected_tokens

ISOLATIONS = ["thread", "process"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(params=ISOLATIONS)
async def llm(request: pytest.FixtureRequest) -> AsyncIterator[AsyncLLM]:
    async with engine.open_engine("null", isolation=request.param, max_num_seqs=8) as opened:
        yield opened


@asynccontextmanager
async def slow_engine(isolation: str, **settings: object) -> AsyncIterator[AsyncLLM]:
    async with engine.open_engine("null", isolation=isolation, null_step_ms=5, **settings) as opened:
        yield opened


async def wait_until_idle(llm: AsyncLLM) -> None:
    with trio.fail_after(5):
        await llm.wait_for_stats(
            lambda stats: not (llm.num_live or stats.num_running or stats.num_waiting or stats.num_used_blocks)
        )


async def test_the_tokens_are_those_of_the_definition(llm: AsyncLLM) -> None:
    prompt = list(b"the quick brown fox")
    async with llm.generate(prompt, GREEDY) as stream:
        output = await stream.collect()
    (completion,) = output.outputs
    assert completion.token_ids == expected_tokens(prompt, GREEDY, 24)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.text == bytes(completion.token_ids).decode()
    assert output.finished
    assert stream.usage.completion_tokens == 24


async def test_many_streams_at_once_get_their_own_tokens(llm: AsyncLLM) -> None:
    prompts = [[65 + i] * (i + 1) for i in range(20)]
    results: dict[int, list[int]] = {}

    async def consume(i: int) -> None:
        async with llm.generate(prompts[i], GREEDY) as stream:
            tokens = []
            async for delta in stream:
                tokens += delta.token_ids
            results[i] = tokens

    async with trio.open_nursery() as nursery:
        for i in range(20):
            nursery.start_soon(consume, i)
    assert results == {i: expected_tokens(prompt, GREEDY, 24) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_leaving_a_stream_early_aborts_it_and_frees_its_blocks(isolation: str) -> None:
    async with slow_engine(isolation) as llm:
        async with llm.generate("hello", SamplingParams(max_tokens=8000)) as stream:
            async for _ in stream:
                break
        await wait_until_idle(llm)


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_cancelled_reader_aborts_its_request(isolation: str) -> None:
    async with slow_engine(isolation) as llm:
        with trio.move_on_after(0.05):
            await llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=8000))
        await wait_until_idle(llm)
        answer = await llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        assert len(answer.outputs[0].token_ids) == 24


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_abort_by_label_gives_a_last_output_with_reason_abort(isolation: str) -> None:
    async with slow_engine(isolation) as llm:
        async with llm.generate("x", SamplingParams(max_tokens=8000, n=2), request_id="mine") as stream:
            reasons = []
            async for delta in stream:
                llm.abort("mine")
                if delta.finish_reason is not None:
                    reasons.append(delta.finish_reason)
        assert reasons == [FinishReason.ABORT, FinishReason.ABORT]


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_leaving_the_engine_ends_open_streams_with_abort(isolation: str) -> None:
    ends = []

    async def read(llm: AsyncLLM, started: trio.Event) -> None:
        async with llm.generate("x", SamplingParams(max_tokens=8000)) as stream:
            async for delta in stream:
                started.set()
                ends.append(delta.finish_reason)

    async with trio.open_nursery() as nursery, slow_engine(isolation) as llm:
        events = [trio.Event() for _ in range(3)]
        for event in events:
            nursery.start_soon(read, llm, event)
        for event in events:
            await event.wait()
    assert [end for end in ends if end is not None] == [FinishReason.ABORT] * 3


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_cancelling_around_the_engine_leaves_nothing(isolation: str) -> None:
    with trio.move_on_after(0.3) as scope:
        async with slow_engine(isolation) as llm:
            await llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=8000))
            await trio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_the_bodys_own_exception_comes_out_bare(isolation: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with slow_engine(isolation):
            raise ZeroDivisionError


async def test_a_killed_engine_ends_every_stream_with_the_cause() -> None:
    async with slow_engine("process") as llm:
        errors = []

        async def read(task_status: trio.TaskStatus[None]) -> None:
            async with llm.generate("x", SamplingParams(max_tokens=8000)) as stream:
                await anext(stream)
                task_status.started()
                try:
                    async for _ in stream:
                        pass
                except EngineDeadError as error:
                    errors.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                await nursery.start(read)
            os.kill(llm.ready.pid, signal.SIGKILL)
            with trio.fail_after(5):
                await llm.wait_ended()
        assert len(errors) == 3
        assert "SIGKILL" in str(errors[0])
        assert not llm.is_healthy
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async with llm.generate("x"):
                pass
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()


async def test_stop_strings_end_the_text_and_the_request(llm: AsyncLLM) -> None:
    prompt = list(b"abc")
    tokens = bytes(expected_tokens(prompt, SamplingParams(temperature=0), 30)).decode()
    stop = tokens[9:12]
    params = SamplingParams(temperature=0, max_tokens=8000, stop=(stop,))
    async with llm.generate(prompt, params) as stream:
        output = (await stream.collect()).outputs[0]
    assert output.text == tokens[: tokens.index(stop)]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == stop
    await wait_until_idle(llm)


async def test_output_kinds_agree(llm: AsyncLLM) -> None:
    outputs = {}
    for kind in OutputKind:
        params = SamplingParams(temperature=0, max_tokens=12, output_kind=kind, n=2)
        async with llm.generate("same", params) as stream:
            outputs[kind] = [(o.text, o.token_ids) for o in (await stream.collect()).outputs]
    assert outputs[OutputKind.DELTA] == outputs[OutputKind.CUMULATIVE] == outputs[OutputKind.FINAL_ONLY]


async def test_seeded_requests_repeat_and_children_differ(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=1, max_tokens=16, n=2, seed=7)
    texts = []
    for _ in range(2):
        async with llm.generate("dice", params) as stream:
            texts.append([o.text for o in (await stream.collect()).outputs])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


async def test_refusals_show_the_numbers_and_start_nothing(llm: AsyncLLM) -> None:
    limit = llm.ready.max_model_len
    for prompt, params, error, text in [
        ("", None, InvalidRequest, "empty"),
        ([], None, InvalidRequest, "empty"),
        ([1, 99999], None, InvalidRequest, "99999"),
        ([-1], None, InvalidRequest, "-1"),
        ([1] * limit, None, PromptTooLong, str(limit)),
        ([1] * (limit - 5), SamplingParams(max_tokens=10), PromptTooLong, "max_tokens is 10"),
        ("\ud800", None, InvalidRequest, "surrogate"),
        (3.5, None, InvalidRequest, "float"),
    ]:
        with pytest.raises(error, match=text):
            async with llm.generate(prompt, params):
                pass
    assert llm.num_live == 0


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_more_requests_than_may_wait_are_refused(isolation: str) -> None:
    async with slow_engine(isolation, max_num_seqs=1, max_num_waiting=1) as llm:
        params = SamplingParams(max_tokens=8000)
        async with llm.generate("a", params), llm.generate("b", params):
            with pytest.raises(QueueFull, match="max-num-waiting 1"):
                async with llm.generate("c", params):
                    pass
        await wait_until_idle(llm)


async def test_pause_keeps_requests_waiting_and_resume_runs_them(llm: AsyncLLM) -> None:
    await llm.pause()
    async with llm.generate("x", GREEDY) as stream:
        with trio.move_on_after(0.05) as scope:
            await stream.__anext__()
        assert scope.cancelled_caught
        await llm.resume()
        assert len((await stream.collect()).outputs[0].token_ids) == 24


async def test_prefix_cache_is_hit_and_can_be_reset(llm: AsyncLLM) -> None:
    prompt = [70] * 100
    cached = []
    for reset in (False, False, True):
        if reset:
            assert await llm.reset_prefix_cache()
        async with llm.generate(prompt, GREEDY) as stream:
            await stream.collect()
        cached.append(stream.num_cached_tokens)
    assert cached == [0, 96, 0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"isolation": "fork"}, "isolation"),
        ({"data_parallel_size": 2, "isolation": "thread"}, "data_parallel_size is 2"),
        ({"data_parallel_size": 0}, "data-parallel-size"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_num_seqs": 0}, "max-num-seqs"),
        ({"device": "cuda:0"}, "cuda:0"),
    ],
)
async def test_wrong_settings_are_refused_before_anything_starts(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        async with engine.open_engine("null", **settings):
            pass


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_failed_start_raises_the_operators_own_error(isolation: str) -> None:
    with pytest.raises(ConfigError, match="max-model-len"):
        async with engine.open_engine("null", isolation=isolation, max_model_len=4096, num_gpu_blocks_override=2):
            pass


async def test_an_engine_process_that_dies_while_starting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.handshake._MAIN", "raise RuntimeError('no GPU today')")
    with trio.fail_after(10), pytest.raises(EngineDeadError, match="no GPU today"):
        async with engine.open_engine("null"):
            pass


async def test_an_engine_that_does_not_stop_is_said_so_when_the_block_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.launch.STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr("engine.engine_process.TERM_GRACE_S", 0.1)
    with trio.fail_after(10), pytest.raises(EngineDeadError, match=r"did not stop within 0\.1 seconds"):
        async with engine.open_engine("null", null_step_ms=30000) as llm, llm.generate("x"):
            await trio.sleep(0.1)


async def test_a_stream_that_outlives_an_engine_that_did_not_stop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.launch.STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr("engine.engine_process.TERM_GRACE_S", 0.1)
    errors: list[EngineDeadError] = []

    async def read(llm: AsyncLLM, entered: trio.Event) -> None:
        async with llm.generate("x") as stream:
            entered.set()
            with pytest.raises(EngineDeadError, match="was left") as caught:
                await stream.collect()
        errors.append(caught.value)

    with trio.fail_after(10), pytest.RaisesGroup(pytest.RaisesExc(EngineDeadError, match="did not stop")):
        async with trio.open_nursery() as nursery, engine.open_engine("null", null_step_ms=30000) as llm:
            entered = trio.Event()
            nursery.start_soon(read, llm, entered)
            await entered.wait()
            await trio.sleep(0.1)  # the step has begun
    assert len(errors) == 1


async def test_an_engine_that_dies_while_it_is_stopped_is_said_so() -> None:
    async def kill_and_leave() -> None:
        async with engine.open_engine("null", null_step_ms=30000) as llm, llm.generate("x"):
            os.kill(llm.ready.pid, signal.SIGKILL)  # not noticed before the block is left

    with trio.fail_after(10), pytest.raises(EngineDeadError, match="SIGKILL"):
        await kill_and_leave()


async def give_up_at(phase: str) -> list[str]:
    """Open the default model's engine and cancel that in `phase`; returns the phases until then."""
    phases: list[str] = []
    with trio.fail_after(10), trio.CancelScope() as scope:

        def progress(reached: str, done: int, total: int) -> None:
            phases.append(reached)
            if reached == phase:
                scope.cancel()

        async with engine.open_engine(progress=progress):
            pytest.fail("there is no model")
    assert scope.cancelled_caught
    return phases


@pytest.mark.slow
async def test_a_download_whose_index_does_not_answer_is_given_up_at_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRONOME_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with socket.create_server(("127.0.0.1", 0)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        assert await give_up_at("fetch") == ["fetch"]
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


async def test_waiting_for_another_process_that_fills_the_cache_is_given_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRONOME_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert await give_up_at("wait") == ["wait"]


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_more_completions_than_may_ever_be_live_are_refused_whole(isolation: str) -> None:
    async with slow_engine(isolation, max_num_seqs=2, max_num_waiting=1) as llm:
        with pytest.raises(InvalidRequest, match="4 completions are asked for, and at most 3"):
            async with llm.generate("a", SamplingParams(n=4)):
                pass
        assert llm.num_live == 0
        async with llm.generate("a", SamplingParams(n=2, max_tokens=8000)):
            with pytest.raises(QueueFull, match="with 2 more"):
                async with llm.generate("b", SamplingParams(n=2)):
                    pass
            assert llm.num_live == 2


async def test_an_engine_that_is_given_up_tells_every_stream() -> None:
    async with slow_engine("process") as llm, llm.generate("x", SamplingParams(max_tokens=8000)) as stream:
        await stream.__anext__()
        llm.give_up(Cause("EngineStuck", "it does not answer"))
        with pytest.raises(EngineDeadError, match="does not answer"):
            await stream.collect()
        assert not llm.is_healthy


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_an_engine_that_stands_still_is_killed_as_soon_as_that_is_known(
    is_given_up: bool, monkeypatch: pytest.MonkeyPatch, temporary_folder: Path
) -> None:
    monkeypatch.setattr("engine.launch.STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr("engine.engine_process.TERM_GRACE_S", 600)  # an engine that is ready takes no SIGTERM

    async def stop_it_and_leave() -> None:
        async with slow_engine("process") as llm, llm.generate("x", SamplingParams(max_tokens=8000)) as stream:
            await stream.__anext__()
            os.kill(llm.ready.pid, signal.SIGSTOP)
            if is_given_up:
                llm.give_up(Cause("EngineStuck", "it does not answer"))
                await stream.collect()

    with trio.fail_after(20), pytest.raises(EngineDeadError, match=r"EngineStuck: .* not (answer|stop)"):
        await stop_it_and_leave()


async def test_the_first_death_stays() -> None:
    stuck, late = EngineDeadError(Cause("EngineStuck", "it does not answer")), EngineDeadError(Cause("x", "late"))
    ready = EngineReady(0, 8, 16, 8192, 1, 256, "digest", os.getpid())
    send, receive = trio.open_memory_channel[Any](9)
    client = AsyncMPClient(EngineConfig(model="null"), ready, _MemoryConnection(send, receive))
    client.shutdown()
    client.declare_dead(stuck)
    client.declare_dead(late)
    assert client.death is stuck
    for last_word in (EngineStopped(), EngineDead(late.cause)):
        client._received.append(last_word)
        with pytest.raises(EngineDeadError, match="does not answer"):
            await client.get_output()
        assert client.death is stuck
        assert not client.has_stopped


async def _open_and_leave() -> None:
    async with engine.open_engine("null"):
        pass


async def _open_without_trio() -> None:
    engine.LLM("null", isolation="process")


@pytest.mark.parametrize("start", [_open_and_leave, _open_without_trio])
async def test_a_folder_for_temporary_files_that_sockets_cannot_use_is_refused_with_what_to_do(
    start: Callable[[], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    for folder in (deep, tmp_path / "missing"):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(ConfigError, match="set TMPDIR to a folder with a short path in which"):
            await start()
        assert not folder.exists() or not list(folder.iterdir())
