"""Chat templates are rendered as the library transformers renders them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from clotho.models.chat_template import ChatTemplate
from tests.models.real_templates import TEMPLATES

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
