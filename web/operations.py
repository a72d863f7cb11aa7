"""What probes and dashboards ask: health, load, version, metrics, the list of models."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from quart import Response

import engine
from engine.metrics import COUNTERS, GAUGES
from web.errors import RETRY_AFTER_S, ModelNotFound
from web.state import ServerState


async def health(state: ServerState) -> Response:
    """200 while new requests have a chance; 503 when the server is stopping and at once when the engine is dead."""
    if state.is_healthy:
        return Response("", 200)
    return Response("", 503, headers={"Retry-After": str(RETRY_AFTER_S)})


async def load(state: ServerState) -> Response:
    """How many generation requests are open."""
    return _json({"server_load": state.num_open_requests})


async def version(state: ServerState) -> Response:
    """The version of this server."""
    return _json({"version": engine.__version__})


async def models(state: ServerState) -> Response:
    """The one model served here, in OpenAI's list; probes ask here too, so a dead engine serves none."""
    state.check_alive()
    return _json({"object": "list", "data": [_model(state)]})


async def model(state: ServerState, name: str) -> Response:
    """The model of that name, or 404."""
    state.check_alive()
    if name != state.model_name:
        raise ModelNotFound(f"model {name!r:.80} is not served here; use {state.model_name!r}", param="model")
    return _json(_model(state))


class StatsCollector(Collector):
    """Reads the engine's last statistics when Prometheus asks; keeps nothing of its own."""

    def __init__(self, state: ServerState) -> None:
        """Read from the engine of `state`."""
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Yield every gauge and counter of engine.metrics, labelled with model and engine."""
        by_engine = self._state.engine.stats_by_engine()
        for families, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, (help_text, attribute) in families.items():
                family = kind(name, help_text, labels=["model_name", "engine"])
                for index, stats in enumerate(by_engine):
                    family.add_metric([self._state.model_name, str(index)], getattr(stats, attribute))
                yield family


def metrics_registry(state: ServerState) -> CollectorRegistry:
    """Return a registry of this server alone; the process-wide one stays untouched."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(state))
    return registry


async def metrics(registry: CollectorRegistry) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


def _model(state: ServerState) -> dict[str, object]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "metronome",
        "max_model_len": state.engine.ready.max_model_len,
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), content_type="application/json")
