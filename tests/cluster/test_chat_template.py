"""Chat templates render as transformers renders them; hostile ones are refused when the model is loaded."""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.chat_template import ChatTemplate, template_of_file
from cluster.errors import InvalidRequest, StartupError
from cluster.tokenizer import load_tokenizer

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ďábelské 😀\n\n  indented"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "{{ 7 * 7 }} {% raw %} <|im_end|>"}],
]


@pytest.mark.model
def test_default_model_renders_as_transformers_does(default_model_path: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(default_model_path.parent), gguf_file=default_model_path.name)
    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer.vocabulary.chat_template is not None
    template = ChatTemplate(tokenizer.vocabulary.chat_template, tokenizer.vocabulary.special_tokens)
    for messages in CONVERSATIONS:
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected


BEGUN: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well, "}],
    [{"role": "user", "content": "Well"}, {"role": "assistant", "content": "Well\n\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "é😀"}],
]


@pytest.mark.model
def test_a_begun_answer_is_written_as_transformers_writes_it_also_where_messages_are_trimmed(
    default_model_path: Path,
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(default_model_path.parent), gguf_file=default_model_path.name)
    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer.vocabulary.chat_template is not None
    for source in (tokenizer.vocabulary.chat_template, HERMES_STYLE):
        template = ChatTemplate(source, tokenizer.vocabulary.special_tokens)
        for messages in BEGUN:
            expected = reference.apply_chat_template(
                messages, tokenize=False, chat_template=source, continue_final_message=True
            )
            assert template.render(messages, add_generation_prompt=False, is_continued=True) == expected


def test_a_template_that_hides_the_last_message_cannot_go_on_with_it() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="cannot be continued") as raised:
        template.render(BEGUN[0], add_generation_prompt=False, is_continued=True)
    assert raised.value.param == "continue_final_message"


def test_a_template_of_ones_own_file_is_used_and_its_faults_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert template_of_file(file, {"bos_token": "^"}).render([{"role": "user", "content": "é"}]) == "^<user>é"
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    with pytest.raises(StartupError, match=r"broken\.jinja fails: TemplateSyntaxError"):
        template_of_file(broken, {})
    with pytest.raises(StartupError, match=r"none\.jinja cannot be read: No such file"):
        template_of_file(tmp_path / "none.jinja", {})
    broken.write_bytes(b"\xff")
    with pytest.raises(StartupError, match="not UTF-8"):
        template_of_file(broken, {})


HERMES_STYLE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'tool' %}{{ raise_exception('begins with a tool') }}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def test_tools_reach_the_template_as_plain_json() -> None:
    template = ChatTemplate(HERMES_STYLE, {})
    tools = [{"type": "function", "function": {"name": "wetter<>&", "parameters": {}}}]
    text = template.render([{"role": "user", "content": " hi "}], tools=tools)
    assert '{"type": "function", "function": {"name": "wetter<>&", "parameters": {}}}' in text
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_raise_exception_is_the_clients_error() -> None:
    template = ChatTemplate(HERMES_STYLE, {})
    with pytest.raises(InvalidRequest, match="begins with a tool") as raised:
        template.render([{"role": "tool", "content": "1"}])
    assert raised.value.param == "messages"


def test_missing_values_of_a_message_are_the_clients_error() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content.strip() }}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="cannot write"):
        template.render([{"role": "user"}])


def test_strftime_now_and_special_tokens() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ strftime_now('%d %b %Y') }}", {"bos_token": "<s>"}, now=lambda: datetime(2026, 7, 26)
    )
    assert template.render([]) == "<s>26 Jul 2026"


def test_generation_blocks_and_loop_controls_are_known() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"  # noqa: E501
    assert ChatTemplate(source, {}).render([{"content": "x"}, {"content": "y"}]) == "x"


HOSTILE = {
    "s_b8 internals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "s_b8 subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "s_b8 include": "{% include '/etc/passwd' %}",
    "s_b19 range": "{% for i in range(10**9) %}x{% endfor %}",
    "s_b19 repetition": "{{ 'a'*10**10 }}",
    "s_b19 list repetition": "{{ [0]*10**10 }}",
    "s_b19 percent format": "{{ '%1000000000d' % 1 }}",
    "s_b19 str.format": "{{ '{:1000000000}'.format(1) }}",
    "s_b19 padding": "{{ 'a'.ljust(10**9) }}",
    "s_b19 power": "{{ 2**(10**9) }}",
    "s_b19 replace": "{{ ('a'*10**6).replace('a', 'b'*10**6) }}",
    "s_b19 replace filter": "{{ ('a'*10**6)|replace('a', 'b'*10**6) }}",
    "s_b19 join": "{{ range(99999)|join('b'*10**6) }}",
    "s_b19 indent": "{{ [1]|tojson(indent=10**9) }}",
    "s_b19 doubling blocks": "{% set n=namespace(x='ab') %}{% for i in range(60) %}{% set n.x %}{{n.x}}{{n.x}}{% endset %}{% endfor %}",  # noqa: E501
    "s_b19 doubling text": "{% set n=namespace(x='ab') %}{% for i in range(60) %}{% set n.x=n.x~n.x %}{% endfor %}",
    "s_b19 squaring": "{% set n=namespace(x=10) %}{% for i in range(60) %}{% set n.x=n.x*n.x %}{% endfor %}",
    "s_b19 recursion": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "syntax": "{% for %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_s_b8_s_b19_hostile_templates_do_not_load(name: str) -> None:
    with pytest.raises(StartupError, match="chat template fails"):
        ChatTemplate(HOSTILE[name], {})


@pytest.mark.parametrize(
    "source",
    [
        "{% set r=range(9999)|list %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",  # noqa: E501
        "{% set n=namespace(x=['ab']) %}{% for i in range(60) %}{% set n.x=[n.x,n.x] %}{% endfor %}",
    ],
)
def test_s_b19_endless_templates_stop_at_the_time_limit(source: str) -> None:
    ticks = itertools.count()
    with pytest.raises(StartupError, match=r"ran too long|too large"):
        ChatTemplate(source, {}, clock=lambda: next(ticks) * 0.01)
    assert next(ticks) < 200
