"""Requests of /v1/messages become conversations; what the server cannot do is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from clotho.serving.openai_fields import Message
from tests.fakes import CharacterTokenizer
from tests.serving.running_server import CONTEXT, Served, serving

ROUTE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def rendered(*messages: tuple[str, str]) -> tuple[int, ...]:
    """Return the prompt of a conversation of roles and contents."""
    return CharacterTokenizer().render_chat([{"role": role, "content": content} for role, content in messages])


async def prompt_of(served: Served, **fields: Any) -> tuple[int, ...]:
    """Send a request, and return the prompt that reaches the engine; its tokens are those that are counted."""
    answer = await served.post(ROUTE, **({"max_tokens": 1} | fields))
    assert answer.status_code == 200, answer.text
    counted = await served.post(COUNT, **fields)
    prompt = served.engine.requests[-1].prompt
    assert counted.json() == {"input_tokens": len(prompt)}
    assert answer.json()["usage"]["input_tokens"] == len(prompt)
    return prompt


async def test_text_blocks_and_the_system_prompt_become_a_conversation() -> None:
    """Blocks of text are joined; marks for a cache have no effect; a last message of the assistant is continued."""
    block = {"type": "text", "text": "2+", "cache_control": {"type": "ephemeral"}}
    user = {"role": "user", "content": [block, {"type": "text", "text": "2?"}]}
    said = {"role": "assistant", "content": [{"type": "text", "text": "4"}]}
    async with serving() as served:
        assert await prompt_of(served, messages=HI) == rendered(("user", "hi"))
        found = await prompt_of(served, system=[{"type": "text", "text": "Be brief."}], messages=[user, said, user])
        turns = (("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"), ("user", "2+2?"))
        assert found == rendered(*turns)
        begun = {"role": "assistant", "content": "It is"}
        opened = await prompt_of(served, system="Be brief.", messages=[user, begun])
        assert CharacterTokenizer().decode(opened).endswith("It is")


async def test_reasoning_text_and_calls_of_an_answer_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of calls are messages of the tool, with the name of the function, in the order of the blocks."""
    seen: list[list[Message]] = []

    def recorded(messages: list[Message], *_: Any) -> list[dict[str, Any]]:
        seen.append(messages)
        return [{"role": "user", "content": "x"}]

    monkeypatch.setattr("clotho.serving.openai_requests.text_messages", recorded)
    use = {"type": "tool_use", "name": "f", "input": {"a": 1}}
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "wait"},
        use | {"id": "1"},
        use | {"id": "2"},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}], "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    messages = [*HI, {"role": "assistant", "content": answer}, {"role": "user", "content": results}]
    async with serving() as served:
        assert (await served.post(ROUTE, max_tokens=1, messages=messages)).status_code == 200
    _, turn, first, second, last = seen[0]
    assert (turn.reasoning_content, turn.content) == ("hm", "wait")
    calls = [(one.id, one.function.name, one.function.arguments) for one in turn.tool_calls or []]
    assert calls == [("1", "f", '{"a": 1}'), ("2", "f", '{"a": 1}')]
    assert [(one.role, one.tool_call_id, one.name, one.content) for one in (first, second)] == [
        ("tool", "1", "f", "one"),
        ("tool", "2", "f", "two"),
    ]
    assert (last.role, last.content) == ("user", "go on")


async def test_sampling_parameters_reach_the_engine() -> None:
    """Those of the API, and the server's own. A limit that does not fit into the context is lowered."""
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7, "stop_sequences": ["x"], "min_p": 0.1}
    async with serving() as served:
        answer = await served.post(ROUTE, messages=HI, max_tokens=4, **fields)
        assert answer.status_code == 200, answer.text
        sampling = served.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
        assert (sampling.stop, sampling.max_tokens) == (("x",), 4)
        prompt = await prompt_of(served, messages=HI)
        answer = await served.post(ROUTE, messages=HI, max_tokens=CONTEXT, ignore_eos=True)
        assert answer.json()["usage"]["output_tokens"] == CONTEXT - len(prompt)
        assert answer.json()["stop_reason"] == "model_context_window_exceeded"


def block(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a request whose message has one block."""
    return {"messages": [{"role": "user", "content": [{"type": kind, **fields}]}]}


TEXT = {"type": "text", "text": "a"}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("messages", block("image", source={"type": "url", "url": "http://169.254.169.254"})),
    ("messages", block("document", source={"type": "text", "data": "a"})),
    ("messages", block("tool_result", tool_use_id="1", content=[{"type": "image"}])),
    ("messages", block("tool_use", id="1", name="f", input={})),
    (
        "messages",
        {"messages": [*HI, {"role": "assistant", "content": [TEXT, {"type": "tool_result", "tool_use_id": "1"}]}]},
    ),
    ("messages", {"messages": []}),
    ("messages", {"messages": [3]}),
    ("messages", {"messages": [{"role": "pirate", "content": "a"}]}),
    ("messages", {"messages": [{"role": "user", "content": "x" * CONTEXT}]}),
    ("system", {"system": [{"type": "image"}]}),
    ("tools", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools", {"tools": [TOOL, TOOL]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool"}}),
    ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("thinking", {"thinking": {"type": "between_tools"}}),
    ("thinking", {"thinking": {"type": "adaptive", "display": "omitted"}}),
    ("output_config", {"output_config": {"effort": "much"}}),
    (
        "output_config",
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "response_format": {"type": "text"}},
    ),
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop_sequences", {"stop_sequences": ["x"] * 17}),
    ("container", {"container": "c"}),
    ("mcp_servers", {"mcp_servers": []}),
    ("n", {"n": 2}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
async def test_a_refusal_names_the_field(param: str, fields: dict[str, Any]) -> None:
    """In Anthropic's format, in the message as well, and before anything is sampled."""
    async with serving() as served:
        answer = await served.post(ROUTE, **({"messages": HI, "max_tokens": 1} | fields))
        assert answer.status_code == 400, answer.text
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["error"]["param"] == param
        assert param in body["error"]["message"]
        assert served.engine.requests == []


async def test_fields_without_an_effect_are_accepted() -> None:
    """Marks for a cache, the place of inference, the tier, metadata, and values that request nothing."""
    nothing: dict[str, Any] = {
        "cache_control": {"type": "ephemeral"}, "inference_geo": "eu", "service_tier": "auto",
        "metadata": {"user_id": "a"}, "tools": [], "tool_choice": {"type": "auto"}, "output_config": {}, "system": "",
    }  # fmt: skip
    async with serving() as served:
        assert await prompt_of(served, messages=HI, **nothing) == rendered(("user", "hi"))


@pytest.mark.parametrize("path", [ROUTE, COUNT])
async def test_errors_that_precede_the_endpoint_have_its_format(path: str) -> None:
    """A missing key, a body that is no JSON, an unknown model, and another method."""
    async with serving(api_key="secret") as served:
        for headers, status, kind in (
            ({}, 401, "authentication_error"),
            ({"x-api-key": "secret", "content-type": "text/plain"}, 415, "invalid_request_error"),
            ({"x-api-key": "secret"}, 404, "not_found_error"),
        ):
            body = (
                {"model": "other", "messages": HI, "max_tokens": 1} if path == ROUTE else {"model": "o", "messages": HI}
            )
            answer = await served.http.post(path, json=body, headers=headers)
            assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (
                status,
                "error",
                kind,
            )
        answer = await served.http.get(path, headers={"x-api-key": "secret"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")
