"""`InprocClient`: nothing is left of a request whose grammar was not compiled, and nothing of an engine that ended."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import engine
from engine.client.inproc import InprocClient
from engine.config import EngineConfig
from engine.errors import QueueFull
from engine.launch import make_client
from engine.outputs import RequestId
from engine.protocol import EngineCoreRequest, SessionPart
from engine.sampling_params import SamplingParams, StructuredOutputsParams
from engine.structured_output.manager import StructuredOutputManager

GREEDY = SamplingParams(temperature=0, max_tokens=3)
WORD = SamplingParams(temperature=0, max_tokens=3, structured_outputs=StructuredOutputsParams(regex="[a-z]{3}"))


@pytest.fixture
def client() -> Iterator[InprocClient]:
    config = EngineConfig(model="null", max_num_seqs=1, max_num_waiting=1)
    with make_client(config, isolation="none", trio=False) as made:
        assert isinstance(made, InprocClient)
        yield made


def request(label: str, params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(RequestId(label), label, [65], params, 0.0)


def compile_by(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    compile_it = StructuredOutputManager.compile

    def compile_and_act(self: StructuredOutputManager, *arguments: Any) -> Any:
        act()
        return compile_it(self, *arguments)

    monkeypatch.setattr(StructuredOutputManager, "compile", compile_and_act)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RecursionError])
def test_a_request_whose_compile_is_interrupted_or_breaks_was_never_added(
    client: InprocClient, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    compile_by(monkeypatch, fail)
    with pytest.raises(error):
        client.add_request(request("a", WORD))
    assert (client.num_live, client.has_work) == (0, False)
    monkeypatch.undo()
    client.add_request(request("a", WORD))
    while client.num_live:
        client.get_output()


def test_a_full_queue_is_refused_before_anything_is_compiled(
    client: InprocClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by(monkeypatch, lambda: pytest.fail("it was compiled"))
    for label in ("a", "b"):
        client.add_request(request(label, GREEDY))
    with pytest.raises(QueueFull):
        client.add_request(request("c", WORD))


def test_an_id_that_is_taken_is_refused_and_its_bearer_lives_on(client: InprocClient) -> None:
    client.add_request(request("a", GREEDY))
    with pytest.raises(ValueError, match="a"):
        client.add_request(request("a", GREEDY))
    assert client.num_live == 1


def test_an_interrupt_comes_during_the_compile_and_starts_none_of_several_completions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm_engine = engine.LLMEngine("null")
    num_compiled = 0

    def interrupt_the_second() -> None:
        nonlocal num_compiled
        num_compiled += 1
        if num_compiled == 2:
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it was held back")

    compile_by(monkeypatch, interrupt_the_second)
    params = SamplingParams(n=3, max_tokens=3, structured_outputs=StructuredOutputsParams(regex="[a-z]{3}"))
    with pytest.raises(KeyboardInterrupt):
        llm_engine.add_request("a", "x", params)
    assert (llm_engine.num_unfinished_requests, llm_engine.client.num_live) == (0, 0)
    assert not llm_engine.has_unfinished_requests()


def test_after_a_shutdown_pages_and_weights_are_free() -> None:
    llm = engine.LLM("null")
    llm.generate([[65]], GREEDY, use_tqdm=False)
    assert isinstance(llm.client, InprocClient)
    held = [weakref.ref(llm.client.runner), weakref.ref(llm.client.core)]
    llm.shutdown()
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    llm.shutdown()


def test_an_interrupt_comes_during_the_compile_for_a_turn_of_a_session_which_is_done_again(
    client: InprocClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it was held back")

    session = msgspec.structs.replace(request("a", GREEDY), extras={"session": True})
    client.add_request(session)
    client.extend(SessionPart(session.request_id, [66], WORD))
    compile_by(monkeypatch, interrupt)
    outputs = iter(client.get_output, None)
    with pytest.raises(KeyboardInterrupt):
        list(outputs)
    monkeypatch.undo()
    client.extend(SessionPart(session.request_id, []))
    token_ids = [
        token_id
        for outputs, _ in zip(iter(client.get_output, None), range(20), strict=False)
        for output in outputs.outputs
        for token_id in output.new_token_ids
    ]
    assert bytes(token_ids[-3:]).decode().isalpha()
