"""Rendering is compared with transformers on templates in the styles that models ship, written for this test."""

from __future__ import annotations

from typing import Any

import pytest

from engine.client.chat_template import ChatTemplate
from engine.errors import CheckpointError, InvalidRequest

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}

TEMPLATES = {
    "chatml": """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}""",
    "default system prompt": """\
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}""",
    "instruction brackets": """\
{% if messages[0].role == 'system' %}
{% set system = messages[0].content %}{% set turns = messages[1:] %}
{% else %}
{% set system = none %}{% set turns = messages %}
{% endif %}
{% for turn in turns %}
{% if turn.role == 'user' %}
{{ bos_token }}[INST] {% if loop.first and system %}<<SYS>>{{ system }}<</SYS>> {% endif %}
{{ turn.content | trim }} [/INST]
{%- elif turn.role == 'assistant' %} {{ turn.content | trim }} {{ eos_token }}{% endif %}
{% endfor %}""",
    "headers": """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' ~ message.role ~ '<|stop|>\\n\\n' ~ message.content | trim ~ '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{%- endif %}""",
    "strict alternation": """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant, got ' + message['role']) }}
{% endif %}
{% if message['role'] == 'user' %}[INST]{{ message['content'] }}[/INST]{% else %}
{{ message['content'] }}{{ eos_token }}{% endif %}
{% endfor %}""",
    "pipes": """\
{% for message in messages %}
{% if message['role'] in ['user', 'system'] %}
<|{{ message['role'] }}|>
{{ message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "turns with a renamed role": """\
{{ bos_token }}{% for message in messages %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<turn>' + role + '\\n' + message.content | trim + '</turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}""",
    "namespace and tests": """\
{% set ns = namespace(system='', seen=0) %}
{% for m in messages %}
{% if m.role == 'system' %}{% set ns.system = ns.system ~ m.content ~ ';' %}
{% else %}{% set ns.seen = ns.seen + 1 %}{% endif %}
{% endfor %}
{{ ns.system }}|{{ ns.seen }}|{% if ns.seen is even %}even{% else %}odd{% endif %}
{% for m in messages if m.role != 'system' %}{{ m.role[0] | upper }}: {{ m.content }}
{% endfor %}""",
    "tools as json": """\
{% if tools %}
Tools:
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
{% endif %}
{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}""",
    "tools indented": """\
{%- if tools is not none and tools %}{{- 'Use: ' + (tools | tojson(indent=2)) }}{%- endif %}
{%- for m in messages %}{{- '\\n' + m.role + '> ' + m.content | string }}{%- endfor %}""",
    "tool calls": """\
{% for m in messages %}
{% if m.tool_calls is defined %}
{% for call in m.tool_calls %}
<call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</call>
{% endfor %}
{% elif m.role == 'tool' %}<result id="{{ m.tool_call_id }}">{{ m.content }}</result>
{% else %}{{ m.role }}: {{ m.content }}
{% endif %}
{% endfor %}""",
    "year": """\
Cutoff 2023. Year {{ strftime_now('%Y') }}.
{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}""",
    "generation marks": """\
{% for m in messages %}
{% if m.role == 'assistant' %}
{% generation %}{% set mark = '*' %}{{ mark }}{{ m.content }}{{ eos_token }}{% endgeneration %}{{ mark }}
{% else %}{{ m.role }}: {{ m.content }}
{% endif %}
{% endfor %}""",
    "loop controls": """\
{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{{ m.role }}: {{ m.content }}
{% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}""",
    "macro": """\
{% macro say(who, what) -%}
<{{ who }}>{{ what }}</{{ who }}>
{%- endmacro %}
{% for m in messages %}{{ say(m.role, m.content) }}{% endfor %}
{{- say('assistant', '') if add_generation_prompt }}""",
    "parts": """\
{% for m in messages %}
{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}
{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}

{% endfor %}""",
    "parts in a macro": """\
{% macro body(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}
{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}
{% for m in messages %}{{ m['role'] }}:{{ body(m['content']) }}
{% endfor %}""",
    "reasoning": """\
{% for m in messages %}
{% if m.reasoning_content is defined and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{% if m.thinking %}({{ m.thinking | length }}){% endif %}{{ m.role }}: {{ m.content }}
{% endfor %}""",
    "thinking switch": """\
{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1].lstrip('\\n') if m.content else '' }}
{% endfor %}
{% if add_generation_prompt %}assistant:{{ ' ' }}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}""",
    "filters and slices": """\
{% set first, rest = messages[0], messages[1:] %}
{{ first.role | capitalize }} {{ first.content | replace('<', '&lt;') | default('?') }} {{ messages | length }}
{{ rest | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{% for m in messages | reverse %}{{ m.role }}{{ ', ' if not loop.last }}{% endfor %}
{{ documents is none }} {{ unknown_name }}{{ pad_token }}""",
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How's the <weather> & wind?",
            "parameters": {"type": "object", "properties": {"town": {"type": "string", "enum": ["Zürich", "東京"]}}},
        },
    }
]
CALLS = [{"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"town": "Zürich", "days": 2}}}]

CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "What is the capital of France?"}],
    "system first": [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Hi\n"}],
    "three turns": [
        {"role": "user", "content": "a < b && 'c'"},
        {"role": "assistant", "content": "  <b>yes</b> "},
        {"role": "user", "content": "¿Señor? 日本語 👩‍👩‍👧\t"},
    ],
    "many turns": [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(7)],
    "special tokens typed": [{"role": "user", "content": "</s><s>[INST] {{ messages }} {% raw %}"}],
    "empty content": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "tool call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"t": 21.5}'},
    ],
    "reasoning": [
        {"role": "user", "content": "2+2?", "name": None},
        {"role": "assistant", "reasoning": "easy", "content": "<think>x</think>\n4"},
        {"role": "user", "content": "sure?"},
    ],
}

OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": TOOLS, "enable_thinking": False, "eos_token": "<over>"},
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)


def oracle_result(oracle: Any, source: str, chat: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """What transformers renders, or None where its template fails."""
    import jinja2

    try:
        return str(oracle.apply_chat_template(chat, chat_template=source, tokenize=False, **options))
    except (jinja2.TemplateError, TypeError, AttributeError):
        return None


def own_result(source: str, chat: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    try:
        named = {name: value for name, value in options.items() if name in ("add_generation_prompt", "tools")}
        variables = {name: value for name, value in options.items() if name not in named}
        return ChatTemplate(source, SPECIAL_TOKENS).render(chat, variables=variables, **named)
    except InvalidRequest:
        return None


def test_there_are_twenty_templates() -> None:
    assert len(TEMPLATES) == 20


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(oracle: Any, name: str) -> None:
    rendered = []
    for chat_name, chat in CHATS.items():
        for options in OPTIONS:
            expected = oracle_result(oracle, TEMPLATES[name], chat, options)
            assert own_result(TEMPLATES[name], chat, options) == expected, (chat_name, options)
            rendered.append(expected)
    assert sum(text is not None for text in rendered) >= len(rendered) / 2


@pytest.mark.parametrize("name", ["parts", "parts in a macro"])
def test_text_parts_reach_templates_that_iterate_over_them(oracle: Any, name: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [{"role": "user", "content": parts}]
    expected = oracle_result(oracle, TEMPLATES[name], chat, {})
    assert expected is not None
    assert own_result(TEMPLATES[name], chat, {"add_generation_prompt": False}) == expected


def test_text_parts_are_joined_by_line_breaks_for_all_other_templates() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [{"role": "user", "content": parts}]
    joined = [{"role": "user", "content": "one\ntwo"}]
    for name in ("chatml", "headers", "turns with a renamed role"):
        template = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)
        assert template.render(chat) == template.render(joined)


def test_what_a_template_refuses_is_the_callers_fault_in_its_words() -> None:
    template = ChatTemplate(TEMPLATES["strict alternation"], SPECIAL_TOKENS)
    with pytest.raises(InvalidRequest, match="refuses these messages: Roles must alternate user/assistant, got system"):
        template.render([{"role": "system", "content": "a"}])


def test_what_a_template_cannot_do_with_a_message_is_the_callers_fault() -> None:
    template = ChatTemplate("{{ messages[0].content + 1 }}{{ messages[0].tool_calls[0] }}", {})
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        template.render([{"role": "user", "content": "a"}])


def test_template_that_is_no_jinja_is_the_models_fault_with_its_line() -> None:
    with pytest.raises(CheckpointError, match="not valid Jinja: line 2"):
        ChatTemplate("fine\n{% if %}", {})


@pytest.mark.parametrize(
    ("messages", "said", "param"),
    [
        ([], "list of at least one message", "messages"),
        ("Hi", "list of at least one message, got 'Hi'", "messages"),
        (["Hi"], "must be an object with role and content, got 'Hi'", "messages[0]"),
        ([{"content": "a"}], "role must be a non-empty string, got None", "messages[0].role"),
        ([{"role": 3, "content": "a"}], "role must be a non-empty string, got 3", "messages[0].role"),
        ([{"role": "user"}], "content is missing: only an assistant's may be", "messages[0].content"),
        ([{"role": "user", "content": 5}], "a string or a list of text parts, got 5", "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "of type 'image_url': only text parts",
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": ["a"]}], "of type None: only text parts", "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "text must be a string",
            "messages[0].content[0].text",
        ),
        (
            [{"role": "user", "content": "a", "extra": object()}],
            "must be plain JSON data, got object",
            "messages[0].extra",
        ),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages: Any, said: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(TEMPLATES["chatml"], {}).render(messages)
    assert said in str(refused.value)
    assert refused.value.param == param


def test_messages_nested_too_deeply_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        ChatTemplate(TEMPLATES["chatml"], {}).render([{"role": "user", "content": "a", "x": nested}])


def test_variables_cannot_replace_what_the_request_itself_says() -> None:
    with pytest.raises(InvalidRequest, match="messages cannot be set as a template variable"):
        ChatTemplate(TEMPLATES["chatml"], {}).render([{"role": "user", "content": "a"}], variables={"messages": []})


def test_template_cannot_reach_into_python() -> None:
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(InvalidRequest, match="refuses"):
            ChatTemplate(attack, {}).render([{"role": "user", "content": "a"}])


def test_messages_of_the_caller_are_not_changed() -> None:
    chat = [{"role": "assistant", "content": None, "reasoning": "r"}, {"role": "user", "content": "a"}]
    before = [dict(message) for message in chat]
    ChatTemplate(TEMPLATES["reasoning"], {}).render(chat)
    assert chat == before
