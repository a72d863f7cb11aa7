"""What probes and operators read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

import engine
from engine.metrics import COUNTERS, GAUGES


async def test_health_is_200_while_the_engine_lives(served):
    for path in ("/health", "/ping"):
        answer = await served.request("GET", path)
        assert (answer.status, answer.body) == (200, b"")


async def test_version_is_the_packages(served):
    assert (await served.request("GET", "/version")).json() == {"version": engine.__version__}


async def test_openai_client_lists_and_retrieves_the_model(served):
    listed, one = await served.with_client(lambda client: (list(client.models.list()), client.models.retrieve("null")))
    assert [model.id for model in listed] == ["null"]
    assert (one.id, one.object, one.owned_by) == ("null", "model", "metronome")
    assert one.max_model_len == served.engine.ready.max_model_len


async def test_metrics_have_vllms_names_and_labels_and_follow_the_engine(open_served):
    async with open_served(null_step_ms=20) as served, await served.open_stream(max_tokens=1000):
        await served.wait_counts(lambda running, waiting, used: running == 1 and used > 0)
        answer = await served.request("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    assert families.keys() == GAUGES.keys() | COUNTERS.keys()
    for family in families.values():
        (sample,) = family.samples
        assert sample.labels == {"model_name": "null", "engine": "0"}
    assert families["vllm:num_requests_running"].samples[0].value == 1
    assert 0 < families["vllm:kv_cache_usage_perc"].samples[0].value <= 1
