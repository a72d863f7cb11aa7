"""`POST /v1/completions`: text or token ids in, their continuation out; several prompts in one request."""

from __future__ import annotations

from quart import Response

from web.answer_form import AnswerForm
from web.body import read_json_body
from web.errors import telling_of
from web.generation import answer
from web.logprobs import of_completion
from web.schemas import decode_completion
from web.state import ServerState

FORM = AnswerForm(
    id_prefix="cmpl",
    kind="text_completion",
    chunk_kind="text_completion",
    opening=None,
    piece=lambda text: {"text": text},
    ending={"text": ""},
    whole=lambda text: {"text": text},
    logprobs=of_completion,
    has_prompt_logprobs_in_choice=True,
)


async def completions(state: ServerState) -> Response:
    """Answer the current request; without a limit of its own a completion has 16 tokens, as OpenAI's had."""
    request = decode_completion(await read_json_body(state))
    state.check_accepting(request.model)
    with telling_of(request.form_field):
        params = request.sampling_params(**state.engine.tokenizer.sampling_defaults)
        return await answer(state, FORM, request, request.prompts, params)
