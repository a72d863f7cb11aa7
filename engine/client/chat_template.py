"""Chat messages to prompt text by a model's Jinja template, rendered as transformers renders it.

Templates come with model files and are run in Jinja's immutable sandbox; messages come from callers and are checked
before the template sees them. Whatever a template does with valid messages and does not like is the request's fault.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, InvalidRequest

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read the first, some the second."""


class ChatTemplate:
    """One compiled template; immutable, may be used from several threads.

    Attributes:
        source: Its text.
        variables: The names it reads beside what it sets itself.
        shows_tools: Whether it reads the tools it is given.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; `special_tokens` (bos_token, …) are visible to it as variables.

        Raises:
            CheckpointError: It is not valid Jinja.
        """
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is not valid Jinja: line {error.lineno}: {error}") from error
        self.source = source
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.shows_tools = "tools" in self.variables
        self._special_tokens = dict(special_tokens)
        self._iterates_parts = _iterates_over_content(tree)

    def render(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of `messages`; `variables` are visible to the template beside them.

        A content given as text parts reaches the template as such if the template iterates over contents, else joined
        by line breaks.

        Raises:
            InvalidRequest: The messages are malformed, or the template refuses them; the caller's fault.
        """
        variables = dict(variables or {})
        if reserved := _RESERVED & variables.keys():
            raise InvalidRequest(f"{min(reserved)} cannot be set as a template variable", param="chat_template_kwargs")
        try:
            return self._template.render(
                {"documents": None, **self._special_tokens, **_plain(variables, "chat_template_kwargs")},
                messages=_checked_messages(messages, self._iterates_parts),
                tools=_plain(tools, "tools"),
                add_generation_prompt=add_generation_prompt,
            )
        except InvalidRequest:
            raise
        except RecursionError:
            raise InvalidRequest("the messages are nested too deeply", param="messages") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


class _GenerationBlock(Extension):
    """Accept `{% generation %}…{% endgeneration %}`, which marks training text and renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Put the body in a scope of its own: what it sets is not seen after it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _iterates_over_content(tree: nodes.Template) -> bool:
    """Whether some loop of the template runs over a message's content, so that it knows of parts."""
    for loop in tree.find_all(nodes.For):
        for node in (loop.iter, *loop.iter.find_all(nodes.Expr)):
            # message.content, message["content"], or a variable that holds it
            if "content" in (getattr(node, "attr", None), getattr(node, "value", None), getattr(node, "name", None)):
                return True
    return False


def _checked_messages(messages: Any, iterates_parts: bool) -> list[dict[str, Any]]:
    """Return a copy of `messages` as templates expect them, or refuse them."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest(f"messages must be a list of at least one message, got {messages!r}", param="messages")
    return [_checked_message(message, f"messages[{i}]", iterates_parts) for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str, iterates_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object with role and content, got {message!r}", param=where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a non-empty string, got {role!r}", param=f"{where}.role")
    if content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is missing: only an assistant's may be", param=f"{where}.content")
    # Templates print a None as the word; a key that is missing they know how to handle.
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    if content is not None and not isinstance(content, str):
        texts = _part_texts(content, f"{where}.content")
        if not iterates_parts:
            plain["content"] = "\n".join(texts)
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _part_texts(content: Any, where: str) -> list[str]:
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where} must be a string or a list of text parts, got {content!r}", param=where)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequest(
                f"{where}[{index}] is of type {kind!r}: only text parts are supported", param=f"{where}[{index}]"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{index}].text must be a string", param=f"{where}[{index}].text")
    return [part["text"] for part in content]


def _plain(value: Any, where: str) -> Any:
    """Copy plain JSON data; a template must not meet an object with methods of its own."""
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise InvalidRequest(f"{where} must be plain JSON data, got {type(value).__name__}", param=where)
