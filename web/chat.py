"""`POST /v1/chat/completions`: a conversation in, the assistant's next turn out."""

from __future__ import annotations

import msgspec
from quart import Response

from engine.client.parsers.forced import CallListParser, NamedCallParser
from engine.client.parsers.pieces import Parser
from engine.client.parsers.reasoning import END, START, Opening, opening_after
from engine.client.parsers.registry import TOOL_FORMATS, ChatParser, ToolFormat, tool_format, writes_reasoning
from engine.client.stream import Stream
from engine.errors import InvalidRequest, RequestError
from engine.sampling_params import SamplingParams
from web.answer_form import AnswerForm, Reader
from web.body import read_json_body
from web.chat_reader import ChatReader
from web.chat_schemas import ChatCompletionRequest, decode_chat_completion
from web.errors import telling_of
from web.generation import answer
from web.logprobs import of_chat
from web.state import ServerState
from web.tool_schemas import NamedTool, schemas_of

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
    reading = Reading(state, request)
    try:
        with telling_of(request.form_field):
            params = reading.shown(request.sampling_params(**state.engine.tokenizer.sampling_defaults, max_tokens=None))
            return await answer(state, FORM, request, [request.prompt], params, reading.make_reader)
    except RequestError as error:
        if error.param == "prompt":  # the engine's name for what this route calls messages
            error.param = "messages"
        raise


class Reading:
    """How the answers to one request are read: with which parsers, by what the model writes and the request wants."""

    def __init__(self, state: ServerState, request: ChatCompletionRequest) -> None:
        """Choose the parsers.

        Raises:
            InvalidRequest: Calls may come, and nobody knows how this model writes them, or its chat template does not
                read a reasoning effort that is asked for; the caller's fault.
        """
        config, tokenizer = state.engine.config, state.engine.tokenizer
        if request.reasoning_effort is not None and not tokenizer.template_reads("reasoning_effort"):
            message = "this model's chat template reads no reasoning_effort: leave it out"
            raise InvalidRequest(message, param="reasoning_effort")
        self._request = request
        self._token_id = tokenizer.token_id
        self._special_ids = tokenizer.special_token_ids
        self._writes_reasoning = writes_reasoning(config.reasoning_parser, tokenizer.template_source)
        self._format = None
        self._choice = request.tool_choice if request.may_call else "none"
        if request.may_call and self._choice in (None, "auto"):
            self._format = tool_format(
                config.tool_call_parser, tokenizer.template_source, shows_tools=tokenizer.shows_tools
            )
            if self._format is None:
                message = "this model's chat template does not say how it calls tools: start the server with one of "
                message += f"--tool-call-parser {', '.join(TOOL_FORMATS)}, or set tool_choice to required or to one"
                raise InvalidRequest(message, param="tools")

    def _enforced(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the form of calls that a strict function asks for where the model decides.

        Raises:
            InvalidRequest: Nothing would enforce it with this model; the caller's fault.
        """
        strict = [index for index, tool in enumerate(self._request.functions) if tool.function.strict]
        if self._format is None or not strict:
            return params
        form_of_calls, told = self._format.form_of_calls, self._request.functions
        if form_of_calls is None or self._needs_special_tokens(self._format):
            param = f"tools[{strict[0]}].function.strict"
            message = f"{param} true cannot be enforced in the way this model calls tools, for no grammar describes it"
            message += ": leave it out, or set tool_choice to required or to one function"
            raise InvalidRequest(message, param=param)
        form = form_of_calls(schemas_of(told))
        return msgspec.structs.replace(params, structured_outputs=form)

    def shown(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the special tokens left in the text that parsers look for; raises InvalidRequest."""
        params = self._enforced(params)
        of_reasoning = (START, END) if self._writes_reasoning else ()
        of_calls = () if self._format is None else self._format.markers
        ids = [token_id for token_id in map(self._token_id, (*of_reasoning, *of_calls)) if token_id is not None]
        return msgspec.structs.replace(params, shown_token_ids=tuple(ids)) if ids else params

    def _needs_special_tokens(self, tools: ToolFormat) -> bool:
        """Whether its calls cannot be written without special tokens, which no form allows."""
        is_optional = tools is TOOL_FORMATS["llama3_json"]
        return not is_optional and not self._special_ids.isdisjoint(map(self._token_id, tools.markers))

    def make_reader(self, stream: Stream) -> Reader | None:
        """Return what reads a choice of `stream`; None where all of it is content."""
        opening = opening_after(stream.prompt or "") if self._writes_reasoning else None
        opening = None if opening is Opening.ANSWER else opening
        tools = self._tool_parser()
        if opening is None and tools is None:
            return None
        at_most_one = self._request.at_most_one_call
        parser = ChatParser(opening, tools, at_most_one_call=at_most_one)
        return ChatReader(parser, names_reason=not isinstance(self._choice, NamedTool))

    def _tool_parser(self) -> Parser | None:
        if self._format is not None:
            return self._format.make_parser([tool.function.name for tool in self._request.functions])
        if isinstance(self._choice, NamedTool):
            return NamedCallParser(self._choice.function.name)
        return CallListParser() if self._choice == "required" else None
