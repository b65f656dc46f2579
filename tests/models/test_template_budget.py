# ruff: noqa: E501
"""The work of chat templates is bounded: every way to multiply it ends with an error."""

from __future__ import annotations

import pytest

from clotho.models import chat_template
from clotho.models.chat_template import ChatTemplate
from clotho.models.template_budget import WorkLimitError
from protocols.errors import RequestError
from tests.small_models import byte_tokenizer

MESSAGES = [{"role": "user", "content": "hello " * 20}]

DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = EXPR %}{% endfor %}{{ ns.x }}"

UNBOUNDED = {
    "string product": "{{ 'a' * 3000000000 }}",
    "list product": "{{ [0] * 3000000000 }}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "text in a loop": "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "text in a macro": "{% macro f() %}" + "x" * 100_000 + "{% endmacro %}{% for i in range(99999) %}{% set y = f() %}{% endfor %}",
    "percent width": "{{ '%1000000000d' % 5 }}",
    "percent variable width": "{{ '%*d' % (1000000000, 1) }}",
    "percent names": "{{ ('%(a)s' * 100000) % {'a': 'b' * 100000} }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format variable width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format fields": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "format filter": "{{ '%1000000000d' | format(5) }}",
    "doubling with +": DOUBLING.replace("EXPR", "ns.x + ns.x"),
    "doubling with ~": DOUBLING.replace("EXPR", "ns.x ~ ns.x"),
    "doubling with join": DOUBLING.replace("EXPR", "[ns.x, ns.x] | join"),
    "doubling with replace": DOUBLING.replace("EXPR", "ns.x.replace('a', ns.x)"),
    "doubling lists": DOUBLING.replace("EXPR", "[ns.x, ns.x]"),
    "doubling dictionaries": DOUBLING.replace("EXPR", "{'a': ns.x, 'b': ns.x}"),
    "doubling tuples": DOUBLING.replace("EXPR", "(ns.x, ns.x)"),
    "doubling blocks": DOUBLING.replace("{% set ns.x = EXPR %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "recursive macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for i in range(99999) recursive %}{% if loop.depth < 3 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "center": "{{ 'a' | center(3000000000) }}",
    "center method": "{{ 'a'.center(3000000000) }}",
    "center by attr": "{{ ('a' | attr('center'))(3000000000) }}",
    "center by map": "{{ ['a'] | map('center', 3000000000) | list }}",
    "center by filter block": "{% filter center(3000000000) %}a{% endfilter %}",
    "center of a constant": "{% autoescape 'a' | center(3000000000) %}{% endautoescape %}",
    "indent": "{{ ('a\n' * 100000) | indent(9000) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(9999) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 1000000) }}",
    "replace of nothing": "{{ ('a' * 100000).replace('', 'b' * 1000000) }}",
    "join": "{{ range(100000) | join('b' * 100000) }}",
    "join method": "{{ ('b' * 1000000).join(['a'] * 100000) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "integers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "rounding": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "json indentation": "{{ [[1]] | tojson(indent=1000000000) }}",
    "time format": "{{ strftime_now('%1000000000Y') }}",
    "bytes": "{{ 'a'.encode('utf-32').center(3000000000) }}",
    "integer bytes": "{{ (1).to_bytes(3000000000, 'big') }}",
    "sum of lists": "{{ ([[1]] * 100000) | sum(start=[]) }}",
    "comparisons": "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% if s == s[1:] ~ 'b' %}{% endif %}{% endfor %}",
    "membership": "{% for i in range(99999) %}{% if 'a' in range(99999) %}{% endif %}{% endfor %}",
    "lists of ranges": "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "sorted ranges": "{% for i in range(99999) %}{% set x = range(99999) | sort %}{% endfor %}",
    "slices": "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% set x = s[::-1] %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("source", UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_unbounded_work_ends_with_an_error(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each template would need many minutes or gigabytes. The test uses a sixteenth of the budget."""
    monkeypatch.setattr(chat_template, "WORK", chat_template.WORK // 16)
    with pytest.raises(WorkLimitError):
        ChatTemplate(source).render(MESSAGES, {}, add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "(" * 50_000, "{{ " + "1+" * 5_000 + "1 }}", "{{ lipsum(9) }}",
     "{% for i in x %}" * 40 + "{% endfor %}" * 40, "{{ {}|xmlattr }}", "{{ ''.__class__.__mro__ }}{{ ''.__class__() }}",
     "x" * 400_000],
    ids=["recursion", "parentheses", "long sum", "lipsum", "nested blocks", "removed filter", "attributes", "long template"],
)  # fmt: skip
def test_other_hostile_templates_are_refused_as_requests(source: str) -> None:
    """Errors of the parser, the compiler and the sandbox name `messages`."""
    with pytest.raises(RequestError) as caught:
        byte_tokenizer(chat_template=source).render_chat(MESSAGES)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 500


def test_a_failed_rendering_does_not_use_up_the_next_budget() -> None:
    """Every rendering has its own budget."""
    template = ChatTemplate("{% if messages[0].content == 'long' %}{{ 'a' * 3000000000 }}{% endif %}ok")
    for _ in range(2):
        with pytest.raises(WorkLimitError):
            template.render([{"role": "user", "content": "long"}], {}, add_generation_prompt=True)
        assert template.render(MESSAGES, {}, add_generation_prompt=True) == "ok"


def test_long_conversations_are_within_the_budget() -> None:
    """10,000 messages, and one message of four million characters, in a template that reads every message several times."""
    source = (
        "{% for m in messages[::-1] %}{% if m.role == 'user' and '</think>' in m.content %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set c = m.content | trim %}{{ m.role + ': ' + c.split('</think>')[-1] ~ '\n' }}{% endfor %}"
    )
    many = [{"role": "user", "content": f"message {number}"} for number in range(10_000)]
    for messages in (many, [{"role": "user", "content": "x" * 4_000_000}]):
        text = ChatTemplate(source).render(messages, {}, add_generation_prompt=True)
        assert len(text) > sum(len(message["content"]) for message in messages)
