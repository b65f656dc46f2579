"""Requests of /v1/responses become conversations; what the server cannot do is refused by name."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from clotho.serving.openai_fields import Message
from tests.fakes import CharacterTokenizer
from tests.serving.running_server import CONTEXT, Served, serving

ROUTE = "/v1/responses"


def rendered(*messages: tuple[str, str]) -> tuple[int, ...]:
    """Return the prompt of a conversation of roles and contents."""
    return CharacterTokenizer().render_chat([{"role": role, "content": content} for role, content in messages])


async def prompt_of(served: Served, **fields: Any) -> tuple[int, ...]:
    """Send a request and return the prompt that reaches the engine."""
    answer = await served.post(ROUTE, **({"max_output_tokens": 1} | fields))
    assert answer.status_code == 200, answer.text
    return served.engine.requests[-1].prompt


async def test_text_messages_and_instructions_become_a_conversation() -> None:
    """A text is a message of the user; instructions and a first system message are one; parts are joined."""
    user = {"role": "user", "content": [{"type": "input_text", "text": "2+"}, {"type": "input_text", "text": "2?"}]}
    said: dict[str, Any] = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "4", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    async with serving() as served:
        assert await prompt_of(served, input="hi") == rendered(("user", "hi"))
        assert await prompt_of(served, input=[user, said, user]) == rendered(
            ("user", "2+2?"), ("assistant", "4"), ("user", "2+2?")
        )
        assert await prompt_of(
            served, instructions="Be brief.", input=[{"role": "developer", "content": "Be kind."}, user]
        ) == rendered(("system", "Be brief.\n\nBe kind."), ("user", "2+2?"))


async def test_reasoning_text_and_calls_of_a_turn_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of calls are messages of the tool, with the name of the function."""
    seen: list[list[Message]] = []

    def recorded(messages: list[Message], *_: Any) -> list[dict[str, Any]]:
        seen.append(messages)
        return [{"role": "user", "content": "x"}]

    monkeypatch.setattr("clotho.serving.openai_requests.text_messages", recorded)
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "wait"},
        call | {"call_id": "1"},
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}]},
    ]
    async with serving() as served:
        await prompt_of(served, input=items)
    user, turn, first, second, last = seen[0]
    assert (user.role, turn.role, last.role) == ("user", "assistant", "assistant")
    assert (turn.reasoning_content, turn.content, last.reasoning_content) == ("hm", "wait", "so")
    assert [(one.id, one.function.name) for one in turn.tool_calls or []] == [("1", "f"), ("2", "f")]
    assert [(one.role, one.tool_call_id, one.name, one.content) for one in (first, second)] == [
        ("tool", "1", "f", "one"),
        ("tool", "2", "f", "two"),
    ]


async def test_sampling_parameters_reach_the_engine() -> None:
    """Those of the API, and the server's own."""
    async with serving() as served:
        await prompt_of(
            served,
            input="a",
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            seed=7,
            stop=["x"],
            max_output_tokens=4,
            top_logprobs=2,
        )
        sampling = served.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
        assert (sampling.stop, sampling.max_tokens, sampling.top_logprobs) == (("x",), 4, 2)


async def test_truncation_keeps_the_last_tokens_if_it_is_automatic() -> None:
    """Room stays for `max_output_tokens`; without truncation, an input that does not fit is refused."""
    async with serving() as served:
        assert (
            len(await prompt_of(served, input="x" * (CONTEXT - 4), truncation="auto", max_output_tokens=9))
            == CONTEXT - 9
        )
        assert len(await prompt_of(served, input="x", truncation="auto")) == len(rendered(("user", "x")))
        answer = await served.post(ROUTE, input="x" * (CONTEXT - 4), truncation="disabled")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input"


FUNCTION = {"type": "function", "name": "f"}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("background", {"background": True}),
    ("input", {"input": []}),
    ("input", {"input": 3}),
    ("input", {"input": [3]}),
    ("input", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input", {"input": [{"role": "pirate", "content": "a"}]}),
    (
        "input",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://169.254.169.254"}]}]},
    ),
    ("input", {"input": "x" * CONTEXT}),
    ("tools", {"tools": [{"type": "web_search"}]}),
    ("tools", {"tools": [FUNCTION, FUNCTION]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}),
    ("text", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
    ("text", {"text": {"format": {"type": "json_object", "schema": {}}}}),
    ("text", {"text": {"format": {"type": "text"}}, "response_format": {"type": "text"}}),
    ("reasoning", {"reasoning": {"effort": "much"}}),
    ("include", {"include": ["everything"]}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": CONTEXT}),
    ("metadata", {"metadata": {"a": 1}}),
    ("truncation", {"truncation": "some"}),
    ("n", {"n": 2}),
    ("messages", {"messages": []}),
]


async def test_what_is_refused_is_named_by_the_field_of_this_api() -> None:
    """One line with status 400, and no request reaches the engine."""
    async with serving() as served:
        for param, fields in REFUSED:
            answer = await served.post(ROUTE, **({"input": "a"} | fields))
            assert answer.status_code == 400, (fields, answer.text)
            assert answer.json()["error"]["param"] == param, (fields, answer.text)
            assert "\n" not in answer.json()["error"]["message"]
        assert not served.engine.requests


async def test_a_client_that_names_an_earlier_response_learns_what_to_send() -> None:
    """The error says that the items belong into `input`."""
    async with serving() as served:
        with pytest.raises(openai.BadRequestError) as raised:
            await served.openai.responses.create(model="policy", input="a", previous_response_id="resp_1")
        assert "`input`" in raised.value.message


async def test_fields_without_effect_are_accepted() -> None:
    """Clients send them with every request."""
    nothing: dict[str, Any] = {
        "store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto",
        "stream_options": {"include_obfuscation": False}, "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"}, "max_tool_calls": 3,
        "text": {"verbosity": "low"}, "background": False, "previous_response_id": None, "prompt_cache_key": "k",
        "parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "instructions": None, "truncation": "disabled",
    }  # fmt: skip
    async with serving() as served:
        answer = await served.post(ROUTE, input="a", **nothing)
        assert answer.status_code == 200, answer.text
        assert (answer.json()["metadata"], answer.json()["store"]) == ({"a": "b"}, False)
