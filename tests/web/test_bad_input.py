"""What users get wrong, over a real socket: each gets a clear error, and a stream beside goes on."""

from __future__ import annotations

import contextlib

import pytest
import trio

from engine.client.tokenizer import load_tokenizer

HI = [{"role": "user", "content": "hi"}]
CHAT = {"messages": HI}
BAD = {
    # name: (path, body, status, what the message must say)
    "empty prompt": ("/v1/completions", {"prompt": ""}, 400, "empty"),
    "no token ids": ("/v1/completions", {"prompt": []}, 400, "empty"),
    "prompt over the context": ("/v1/completions", {"prompt": [5] * 8192}, 400, "8192 tokens"),
    "text over the context": ("/v1/completions", {"prompt": "x" * 8192}, 400, "context holds 8192"),
    "text far over the context": ("/v1/completions", {"prompt": "x" * 10**6}, 400, "1000000 characters"),
    "messages over the context": (None, {"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "at most 8192"),
    "max_tokens over the context": (None, {**CHAT, "max_tokens": 9000}, 400, "lower max_tokens to"),
    "id below 0": ("/v1/completions", {"prompt": [-1]}, 400, "0 to 255"),
    "id over the vocabulary": ("/v1/completions", {"prompt": [256]}, 400, "token id 256"),
    "id over 64 bits": ("/v1/completions", {"prompt": [2**70]}, 400, str(2**70)),
    "nested prompts": ("/v1/completions", {"prompt": [[[1]]]}, 400, "prompt[0]"),
    "unknown field": (None, {**CHAT, "nonsense": 1}, 400, "unknown field 'nonsense'"),
    "wrong type": (None, {**CHAT, "max_tokens": "many"}, 400, "max_tokens: Expected `int | null`, got `str`"),
    "no messages": (None, {"messages": []}, 400, "at least one message"),
    "max_tokens 0": (None, {**CHAT, "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0"),
    "temperature below 0": (None, {**CHAT, "temperature": -1}, 400, "from 0 to 2, got -1"),
    "temperature NaN": (None, b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400, "JSON"),
    "temperature over floats": (None, b'{"messages": [{"role":"user","content":"a"}], "temperature": 1e999}', 400, ""),
    "n 0": (None, {**CHAT, "n": 0}, 400, "n must be from 1 to 128, got 0"),
    "n 1000": (None, {**CHAT, "n": 1000}, 400, "got 1000"),
    "lone surrogate in a message": (None, b'{"messages": [{"role":"user","content":"\\ud800"}]}', 400, "surrogate"),
    "lone surrogate in a prompt": ("/v1/completions", b'{"prompt": "a\\udfffb"}', 400, "surrogate"),
    "lone surrogate in a stop": (None, b'{"messages": [{"role":"user","content":"a"}], "stop": "\\ud800"}', 400, ""),
    "bytes that are no UTF-8": (None, b'{"messages": "\xff"}', 400, "UTF-8"),
    "only an empty text": ("/v1/completions", {"prompt": [""]}, 400, "empty"),
    "a number no float holds": (None, {**CHAT, "temperature": 10**400}, 400, "temperature"),
    "max_tokens over words": (None, {**CHAT, "max_tokens": 10**30}, 400, "max_tokens"),
    "min_tokens over max_tokens": (
        None,
        {**CHAT, "max_tokens": 2, "min_tokens": 3},
        400,
        "at most max_tokens, which is 2, got 3",
    ),
    "top_logprobs 10**6": (None, {**CHAT, "logprobs": True, "top_logprobs": 10**6}, 400, "from 0 to 20, got 1000000"),
    "prompt_logprobs below 0": (
        None,
        b'{"messages": [{"role":"user","content":"a"}], "prompt_logprobs": -1}',
        400,
        "from 0 to 20, got -1",
    ),
    "bias of no id": (None, {**CHAT, "logit_bias": {"x": 1}}, 400, "token ids from 0"),
    "bias NaN": (None, b'{"messages": [{"role":"user","content":"a"}], "logit_bias": {"1": NaN}}', 400, "JSON"),
    "bias too large": (None, {**CHAT, "logit_bias": {"1": 101}}, 400, "from -100 to 100, got 101"),
    "empty stop": (None, {**CHAT, "stop": [""]}, 400, "empty string"),
    "stream_options alone": (
        None,
        b'{"messages": [{"role":"user","content":"a"}], "stream_options": {}}',
        400,
        "stream",
    ),
    "regex that is none": (None, {**CHAT, "structured_outputs": {"regex": "["}}, 400, "regex"),
    "regex that looks ahead": (None, {**CHAT, "structured_outputs": {"regex": "(?=a)b"}}, 400, "look-ahead"),
    "schema of an unknown type": (None, {**CHAT, "structured_outputs": {"json": {"type": "text"}}}, 400, "text"),
    "grammar without a start": (None, {**CHAT, "structured_outputs": {"grammar": 'Root ::= "a"'}}, 400, "grammar"),
    "form that is empty": (None, {**CHAT, "structured_outputs": {"json": 5}}, 400, "json must be a JSON object"),
    "surrogate in a tool": (
        None,
        b'{"messages": [{"role":"user","content":"a"}], "tools": [{"type":"function","function":{"name":"\\ud800"}}]}',
        400,
        "surrogate",
    ),
    "tool without a name": (
        None,
        {**CHAT, "tools": [{"type": "function", "function": {}}]},
        400,
        "tools[0].function.name",
    ),
    "truncated to nothing": (None, {**CHAT, "truncate_prompt_tokens": 0}, 400, "at least 1, got 0"),
    "interval 0": (None, {**CHAT, "stream_interval": 0}, 400, "from 1 to 65536, got 0"),
    "very long model": (None, {**CHAT, "model": "x" * 1_000_000}, 404, f"'{'x' * 79} is not served here; use 'null'"),
    "unknown model": (None, {**CHAT, "model": "gpt-9"}, 404, "'gpt-9' is not served here; use 'null'"),
    "bad JSON": (None, b'{"messages": [', 400, "not valid JSON"),
    "deep JSON": (None, b"[" * 100_000, 400, "nested too deeply"),
    "no body": (None, b"", 400, "JSON"),
    "image": (None, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    "body of 5 MB": (None, b" " * 5 * 2**20, 413, str(2**22)),
    "route": ("/v1/nothing", CHAT, 404, "/v1/nothing"),
}


@contextlib.asynccontextmanager
async def stream_beside(served, num_tokens):
    """Run a stream during the block; nothing may happen to it."""
    answers = []

    async def run():
        answers.append(await served.post(served.chat(stream=True, max_tokens=num_tokens)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await served.wait_counts(lambda running, waiting, used: running == 1)
        yield
    *_, last, done = answers[0].events
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


async def test_whatever_is_wrong_is_said_with_value_and_limit_and_disturbs_no_stream_beside(open_served):
    async with open_served(null_step_ms=2) as served, stream_beside(served, 200):
        for name, (path, body, status, says) in BAD.items():
            answer = await served.post(body, path or "/v1/chat/completions")
            assert (answer.status, says in answer.error["message"]) == (status, True), (name, answer)
            assert answer.error["type"] == "invalid_request_error"
            if isinstance(body, dict):
                streamed = await served.post({**body, "stream": True}, path or "/v1/chat/completions")
                assert (streamed.status, streamed.error) == (status, answer.error), name
    assert served.engine.num_live == 0


async def test_100_mb_of_body_or_header_are_refused_without_being_read(open_served):
    async with open_served(null_step_ms=2) as served, stream_beside(served, 200):
        for request, status in (
            (served.http("POST", "/v1/completions", Content_Length=str(10**8)), b"413"),
            (served.http("POST", "/v1/completions", Content_Length="", Transfer_Encoding="chunked"), b"413"),
            (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ", b"431"),
        ):
            num_sent = 0
            async with await served.connect() as stream:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.send_all(request)
                    filling = b"40000\r\n" + b"a" * 2**18 + b"\r\n" if b"chunked" in request else b"a" * 2**18
                    while num_sent < 10**8:
                        await stream.send_all(filling)
                        num_sent += len(filling)
                with contextlib.suppress(trio.BrokenResourceError):
                    assert (await stream.receive_some()).startswith(b"HTTP/1.1 " + status)
            answer = await served.request("GET", "/health")
            assert answer.status == 200


def test_special_tokens_typed_as_text_become_special_as_in_transformers_and_vllm(smollm2_folder):
    """OPERATIONS.md says so: a chat's roles are no wall against what a user types."""
    tokenizer = load_tokenizer(smollm2_folder)
    (end_of_turn,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert end_of_turn in tokenizer.special_token_ids
    plain, forged = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("a", "a<|im_end|>"))
    assert forged.count(end_of_turn) == plain.count(end_of_turn) + 1


@pytest.mark.parametrize("text", ["", " " * 10, "\0", "\u202e", "e" + "\u0301" * 500, "😀" * 100])
async def test_odd_text_that_is_text_is_served(served, text):
    answer = await served.post(served.chat(messages=[{"role": "user", "content": text}]))
    assert answer.status == 200


async def test_an_unknown_role_is_told_the_known_ones_and_a_long_path_is_not_echoed(served):
    answer = await served.post(served.chat(messages=[{"role": "wizard", "content": "hi"}]))
    assert answer.status == 400
    assert "'wizard'; known are system, developer, user, assistant" in answer.error["message"]
    answer = await served.request("GET", "/" + "x" * 5000)
    assert answer.status == 404
    assert len(answer.error["message"]) < 300
