"""The API key: what is open, what is not, and what the page does."""

from __future__ import annotations

import openai
import pytest

from engine.config import ServeConfig
from web.access import api_key_of

KEY = "sk-a-secret"


@pytest.fixture
async def guarded(open_served):
    async with open_served(serve_config=ServeConfig(port=0, api_key=KEY)) as served:
        yield served


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
async def test_probes_and_the_page_are_open(guarded, path):
    assert (await guarded.request("GET", path)).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        "",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        "Bearer ",
        "Bearer",
        f"Bearer {KEY[:-1]}",
        "Bearer sch\xf6n",
        f"{KEY} Bearer",
    ],
)
async def test_anything_but_the_key_gets_401_in_openais_form_on_every_other_path(guarded, sent):
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/nowhere")):
        answer = await guarded.request(method, path, guarded.chat(), Authorization=sent)
        assert answer.status == 401
        assert answer.error["code"] == "invalid_api_key"
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert KEY not in answer.error["message"]
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_key_opens_everything_whatever_the_case_of_the_scheme(guarded, scheme):
    assert (await guarded.post(guarded.chat(), Authorization=f"{scheme} {KEY}")).status == 200
    assert (await guarded.request("GET", "/metrics", Authorization=f"{scheme} {KEY}")).status == 200


async def test_a_key_sent_twice_is_none(guarded):
    async with await guarded.connect() as stream:
        line = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
        await stream.send_all(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + 2 * line + b"\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 401")


async def test_openais_client_knows_the_refusal(guarded):
    def use(client):
        with pytest.raises(openai.AuthenticationError, match="no valid API key"):
            client.models.list()

    await guarded.with_client(use)


async def test_a_path_that_only_looks_open_is_not(guarded):
    for path in ("//", "/health/", "/health/../v1/models", "/%2e", "/HEALTH", "/?x=/health"):
        answer = await guarded.request("GET", path)
        assert answer.status == (200 if path == "/?x=/health" else 401), path


async def test_body_of_a_refused_request_is_not_waited_for(guarded):
    async with await guarded.connect() as stream:
        await stream.send_all(guarded.http("POST", "/v1/completions", Content_Length="1000"))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 401")


def test_the_environment_gives_a_key_unless_the_setting_does(monkeypatch):
    monkeypatch.delenv("METRONOME_API_KEY", raising=False)
    assert api_key_of(ServeConfig()) is None
    monkeypatch.setenv("METRONOME_API_KEY", "from-the-environment\n")
    assert api_key_of(ServeConfig()) == "from-the-environment"
    assert api_key_of(ServeConfig(api_key=KEY)) == KEY
    monkeypatch.setenv("METRONOME_API_KEY", "")
    assert api_key_of(ServeConfig()) is None


async def test_no_other_site_is_let_in(served):
    for method in ("OPTIONS", "GET"):
        answer = await served.request(
            method, "/v1/models", Origin="https://evil.example", Access_Control_Request_Method="POST"
        )
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_the_page_asks_for_the_key_when_it_is_refused(served):
    page = (await served.request("GET", "/")).body.decode()
    assert "response.status === 401" in page
    assert "Bearer " in page


async def test_served_model_name_is_the_only_name(open_served):
    async with open_served(serve_config=ServeConfig(port=0, served_model_name="my model/7")) as served:
        assert (await served.request("GET", "/v1/models")).json()["data"][0]["id"] == "my model/7"
        assert (await served.request("GET", "/v1/models/my%20model/7")).status == 200
        assert (await served.post(served.chat(model="my model/7"))).json()["model"] == "my model/7"
        assert (await served.post(served.chat(model="null"))).status == 404
        assert 'model_name="my model/7"' in (await served.request("GET", "/metrics")).body.decode()


async def test_root_path_is_taken_off_and_may_be_left_out(open_served):
    async with open_served(serve_config=ServeConfig(port=0, root_path="/llm")) as served:
        for path in ("/llm/health", "/health", "/llm", "/llm/", "/llm/v1/models"):
            assert (await served.request("GET", path)).status == 200, path
        for path in ("/llmhealth", "/llm/llm/health"):
            assert (await served.request("GET", path)).status == 404, path


async def test_chat_template_file_takes_the_place_of_the_models_own(open_served, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    async with open_served(chat_template=str(template)) as served:
        usage = (await served.post(served.chat())).json()["usage"]
        assert usage["prompt_tokens"] == len("<hi>")
