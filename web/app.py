"""The Quart application: which route is answered by which function, and under which limits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any, cast

from quart import Response
from quart_trio import QuartTrio

from web.access import KeyCheck
from web.chat import chat_completions
from web.completions import completions
from web.errors import error_response
from web.operations import health, load, metrics, metrics_registry, model, models, version
from web.scope import App, RequestScopes
from web.state import ServerState
from web.verbs import ROUTES, operate

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 2 * 2**20
"""A prompt of 250 thousand token ids fits. Decoding cannot be interrupted: the worst takes half a second."""
BODY_TIMEOUT_S = 60

_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


def create_app(
    state: ServerState,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    api_key: str | None = None,
    root_path: str = "",
    operations_open: bool = False,
) -> QuartTrio:
    """Build the application that answers for `state.engine`; it owns nothing that needs closing.

    A request body above `max_body_bytes` is refused with 413. With an `api_key` all but the open routes want it.
    `root_path` is taken off the paths that begin with it. Without `operations_open` operating routes answer 403.
    """
    app = _App("web", static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,
        BODY_TIMEOUT=BODY_TIMEOUT_S,
        MAX_CONTENT_LENGTH=max_body_bytes,
        MAX_FORM_MEMORY_SIZE=max_body_bytes,
    )
    page = (resources.files("web") / "static" / "index.html").read_text("utf-8")
    _add(app, "POST", "/v1/chat/completions", partial(chat_completions, state))
    _add(app, "POST", "/v1/completions", partial(completions, state))
    _add(app, "GET", "/v1/models", partial(models, state))
    _add(app, "GET", "/v1/models/<path:name>", partial(model, state))
    _add(app, "GET", "/health", partial(health, state))
    _add(app, "GET", "/ping", partial(health, state))
    _add(app, "GET", "/version", partial(version, state))
    _add(app, "GET", "/metrics", partial(metrics, metrics_registry(state)))
    _add(app, "GET", "/load", partial(load, state))
    _add(app, "GET", "/", partial(_index, page))
    for (method, path), answer_verb in ROUTES.items():
        _add(app, method, path, partial(operate, state, operations_open, answer_verb))
    app.register_error_handler(Exception, _answer_error)
    answer = cast(App, app.asgi_app)
    app.asgi_app = RequestScopes(  # type: ignore[method-assign, assignment]
        answer if api_key is None else KeyCheck(answer, api_key), root_path=root_path
    )
    return app


class _App(QuartTrio):
    def log_exception(self, exception_info: Any) -> None:
        """Log to our logger; Quart's would start a thread and a second log on stderr."""
        logger.error("a request failed unexpectedly", exc_info=exception_info)


def _add(app: QuartTrio, method: str, path: str, answer: Callable[..., Any]) -> None:
    app.add_url_rule(path, endpoint=path, view_func=answer, methods=[method])


async def _answer_error(error: Exception) -> Response:
    return error_response(error)


async def _index(page: str) -> Response:
    return Response(page, content_type="text/html; charset=utf-8", headers={"Content-Security-Policy": _PAGE_POLICY})
