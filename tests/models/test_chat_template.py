"""Chat templates are rendered as the library transformers renders them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from attachments.tools.tool_grammars import tool_format
from clotho.models import chat_template
from clotho.models.chat_template import ChatTemplate, WorkLimitError
from protocols.errors import RequestError
from tests.models.real_templates import TEMPLATES
from tests.small_models import byte_tokenizer

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "hi\n"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nyes "},
        {"role": "user", "content": "again"},
    ],
    [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "é<"]}}}],
        },
        {"role": "tool", "content": "7", "name": "f"},
        {"role": "tool", "content": "8"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "text", "text": "two"}]}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning": "because"}],
    [{"role": "assistant", "content": "a"}, {"role": "user", "content": None}],
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(
    name: str, conversation: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    """For templates of common models, and one that uses most features of Jinja. Errors are equal too."""
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")

    def outcome(render: Any) -> str:
        try:
            return str(render())
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    expected = outcome(
        lambda: tokenizer.apply_chat_template(
            copy.deepcopy(conversation),
            chat_template=TEMPLATES[name],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=True,
        )
    )
    variables = tokenizer.special_tokens_map | {"enable_thinking": True}
    template = ChatTemplate(TEMPLATES[name])
    assert (
        outcome(lambda: template.render(conversation, variables, add_generation_prompt=add_generation_prompt))
        == expected
    )


def test_the_switches_of_qwen3_5() -> None:
    """The prompt opens a thought, or closes it; tools and calls are written as they are parsed; images are refused."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATES["Qwen3.5"])
    question: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    function = {"name": "f", "arguments": {"a": "1", "b": [2]}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    chat = [question, call, {"role": "tool", "tool_call_id": "1", "content": "7"}]

    def prompt(messages: list[dict[str, Any]], variables: dict[str, Any] | None = None) -> str:
        return tokenizer.decode(tokenizer.render_chat(messages, tools=tools, variables=variables))

    opened = "hi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert prompt([question], {"enable_thinking": True}).endswith(opened)
    assert prompt([question], {"enable_thinking": False}).endswith("assistant\n<think>\n\n</think>\n\n")
    assert '{"type": "function", "function": {"name": "f"' in prompt([question])
    written = "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2]\n</parameter>\n</function>"
    assert f"<tool_call>\n{written}\n</tool_call><|im_end|>\n" in prompt(chat)
    assert tool_format(TEMPLATES["Qwen3.5"], "auto") == "qwen3_coder"
    with pytest.raises(RequestError, match="not text"):
        prompt([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


@pytest.mark.parametrize("name", ["_a", "__class__", "__init__"])
def test_a_template_sets_no_name_with_an_underscore(name: str) -> None:
    """A namespace is an object of the program. Other names are set, also those that end with an underscore."""
    refused, accepted = (
        ChatTemplate(f"{{% set ns = namespace() %}}{{% set ns.{chosen} = 1 %}}{{{{ ns.{chosen} }}}}")
        for chosen in (name, "a_")
    )
    with pytest.raises(TemplateError, match="underscore"):
        refused.render([], {}, add_generation_prompt=False)
    assert accepted.render([], {}, add_generation_prompt=False) == "1"


DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = EXPR %}{% endfor %}{{ ns.x }}"
ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursive macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "text in a loop": "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "doubling with +": DOUBLING.replace("EXPR", "ns.x + ns.x"),
    "doubling with ~": DOUBLING.replace("EXPR", "ns.x ~ ns.x"),
    "string product": "{{ 'a' * 3000000000 }}",
    "list product": "{{ [0] * 3000000000 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "integers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_that_does_not_end_or_grows_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would need many minutes or gigabytes. Every rendering has limits of its own. The test uses lower ones."""
    monkeypatch.setattr(chat_template, "MAX_STEPS", 10_000)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 300_000)
    template = ChatTemplate("{% if messages[0].content == 'long' %}" + source + "{% endif %}ok")
    for _ in range(2):
        with pytest.raises(WorkLimitError):
            template.render([{"role": "user", "content": "long"}], {}, add_generation_prompt=True)
        assert template.render([{"role": "user", "content": "x"}], {}, add_generation_prompt=True) == "ok"


@pytest.mark.parametrize(
    "source",
    ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "(" * 50_000, "{{ " + "1+" * 5_000 + "1 }}",
     "{% for i in x %}" * 40 + "{% endfor %}" * 40, "{{ ''.__class__.__mro__ }}{{ ''.__class__() }}", "x" * 400_000],
    ids=["recursion", "parentheses", "long sum", "nested blocks", "attributes", "long template"],
)  # fmt: skip
def test_other_hostile_templates_are_refused_as_requests(source: str) -> None:
    """Errors of the parser, the compiler and the sandbox name `messages`."""
    with pytest.raises(RequestError) as caught:
        byte_tokenizer(chat_template=source).render_chat([{"role": "user", "content": "hello"}])
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 500


def test_long_conversations_are_within_the_limits() -> None:
    """10,000 messages, and a message of four million characters, in a template that reads each several times."""
    source = (
        "{% for m in messages[::-1] %}{% if m.role == 'user' and '</think>' in m.content %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set c = m.content | trim %}{{ m.role + ': ' + c.split('</think>')[-1] ~ '\n' }}"
        "{% endfor %}"
    )
    many = [{"role": "user", "content": f"message {number}"} for number in range(10_000)]
    for messages in (many, [{"role": "user", "content": "x" * 4_000_000}]):
        text = ChatTemplate(source).render(messages, {}, add_generation_prompt=True)
        assert len(text) > sum(len(message["content"]) for message in messages)
