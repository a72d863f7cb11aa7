"""`POST /v1/chat/completions`: a conversation in, the assistant's next turn out."""

from __future__ import annotations

from quart import Response

from engine.errors import RequestError
from web.body import read_json_body
from web.generation import AnswerForm, answer
from web.logprobs import of_chat
from web.schemas import decode_chat_completion
from web.state import ServerState

FORM = AnswerForm(
    id_prefix="chatcmpl",
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    piece=lambda text: {"delta": {"content": text}},
    ending={"delta": {}},
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    logprobs=of_chat,
    has_prompt_logprobs_in_choice=False,
)


async def chat_completions(state: ServerState) -> Response:
    """Answer the current request; without a limit of its own it may fill the context."""
    request = decode_chat_completion(await read_json_body(state))
    state.check_accepting(request.model)
    params = request.sampling_params(**state.engine.tokenizer.sampling_defaults, max_tokens=None)
    try:
        return await answer(state, FORM, request, [request.prompt], params)
    except RequestError as error:
        if error.param == "prompt":  # the engine's name for what this route calls messages
            error.param = "messages"
        raise
