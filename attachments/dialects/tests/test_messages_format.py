"""Responses of /v1/messages, whole and streamed, with Anthropic's client and a model of random weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from tests.fakes import CharacterTokenizer
from tests.serving import running_server, test_with_engine
from tests.serving.test_chat_features import HERMES, SCHEMA, TEMPLATES, THINKING

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from anthropic.types import Message

TOOLS: list[Any] = [
    {"name": "f", "input_schema": SCHEMA},
    {"name": "no_arguments", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
LIMITS: dict[str, Any] = {
    "model": "policy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 120,
    "extra_body": {"temperature": 0.7, "seed": 3},
}  # fmt: skip


def client_of(url: str, **options: Any) -> AsyncAnthropic:
    """Return a client, whose certificates would take as long to load as the server to start."""
    from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient  # takes 2 seconds

    http = DefaultAsyncHttpxClient(verify=False)
    return AsyncAnthropic(base_url=url, http_client=http, **{"api_key": "any", "max_retries": 0, **options})


@asynccontextmanager
async def serving(template: str = test_with_engine.TEMPLATE) -> AsyncIterator[AsyncAnthropic]:
    """Serve a model, and yield a client."""
    async with (
        test_with_engine.serving(template) as (_, openai),
        client_of(str(openai.base_url).removesuffix("/v1/")) as client,
    ):
        yield client


def comparable(message: Message) -> dict[str, Any]:
    """Return a message without its random names, and what only a whole message has."""
    fields: dict[str, Any] = message.to_dict(exclude_none=True)
    for block in fields["content"]:
        block.pop("id", None)
    return {name: value for name, value in fields.items() if name not in ("id", "weights_versions")}


async def streamed(client: AsyncAnthropic, **fields: Any) -> tuple[list[Any], Message]:
    """Return the events of a stream and the message that the client makes of them; check the rules of every stream."""
    events: list[Any] = [event async for event in await client.messages.create(**fields, stream=True)]
    names = [event.type for event in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    started = [event.index for event in events if event.type == "content_block_start"]
    assert started == [event.index for event in events if event.type == "content_block_stop"]
    assert started == list(range(len(started)))
    async with client.messages.stream(**fields) as stream:
        return events, await stream.get_final_message()


async def test_a_message_contains_text_usage_and_the_policy_version() -> None:
    """A message that reaches its limit says so."""
    async with running_server.serving() as served, client_of(served.url) as client:
        extra = {"temperature": 0.5, "ignore_eos": True}
        answer = await client.messages.create(**LIMITS | {"max_tokens": 4, "extra_body": extra})
        request = served.engine.requests[0]
        assert request.prompt == CharacterTokenizer().render_chat(LIMITS["messages"])
        assert answer.id == f"msg_{request.request_id}"
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", "policy")
        assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(request.prompt), 4)
        (text,) = answer.content
        assert text.type == "text"
        assert len(text.text) == 4
        extra_fields = answer.model_extra or {}
        assert (extra_fields["weights_version"], extra_fields["system_fingerprint"]) == (3, "f3")
        assert extra_fields["weights_versions"] == {"first": 3, "last": 3}


async def test_a_stream_of_text_makes_the_whole_message() -> None:
    """Its usage is complete with the last event but one."""
    async with serving() as client:
        whole = await client.messages.create(**LIMITS)
        events, message = await streamed(client, **LIMITS)
    assert comparable(message) == comparable(whole)
    assert whole.stop_reason == "max_tokens"
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.content[0].text
    assert events[-2].usage.output_tokens == whole.usage.output_tokens


async def test_a_stop_sequence_is_named() -> None:
    """The text ends before it."""
    async with serving() as client:
        text = (await client.messages.create(**LIMITS)).content[0].text
        stopped = await client.messages.create(**LIMITS, stop_sequences=[text[2]])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[2])
        assert stopped.content[0].text == text[: text.index(text[2])]


@pytest.mark.parametrize("template", ["hermes", "pythonic"])
async def test_a_call_is_a_block_whose_input_is_streamed(template: str) -> None:
    """Any tool for each format of calls, and a named one."""
    named: list[Any] = [{"type": "tool", "name": "f"}] if template == "hermes" else []
    limits = {**LIMITS, "max_tokens": 400, "tools": TOOLS}
    async with serving(TEMPLATES[template]) as client:
        for choice in ({"type": "any"}, *named):
            fields = {**limits, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
            whole = await client.messages.create(**fields)
            events, message = await streamed(client, **fields)
            assert comparable(message) == comparable(whole)
            assert whole.stop_reason == "tool_use"
            (call,) = whole.content
            assert call.type == "tool_use"
            assert call.name == "f" or choice["type"] == "any"
            jsonschema.validate(call.input, SCHEMA if call.name == "f" else {})
            assert {event.delta.type for event in events if event.type == "content_block_delta"} == {"input_json_delta"}


async def test_a_message_is_valid_input_with_the_result_of_its_call() -> None:
    """Its blocks are sent back as they are. A call that is cut is left out of a whole message."""
    async with serving(HERMES) as client:
        fields = {**LIMITS, "tools": TOOLS[1:]}
        first = await client.messages.create(**fields, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        (call,) = first.content
        assert call.type == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "42 degrees"}
        messages = [*LIMITS["messages"], first.to_param(), {"role": "user", "content": [result]}]
        second = await client.messages.create(**{**fields, "messages": messages, "max_tokens": 1})
        assert second.usage.input_tokens > first.usage.input_tokens + len("42 degrees")
        limits: dict[str, Any] = {"max_tokens": first.usage.output_tokens - 3, "tool_choice": {"type": "any"}}
        cut = await client.messages.create(**{**fields, **limits})
        assert cut.stop_reason == "max_tokens"
        assert "tool_use" not in {block.type for block in cut.content}


async def test_reasoning_is_a_block_before_the_text() -> None:
    """A format constrains the text only; `disabled` turns the reasoning off."""
    import anthropic

    output: Any = {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}
    fields = {**LIMITS, "max_tokens": 80, "output_config": output}
    async with serving(THINKING) as client:
        whole = await client.messages.create(**fields, thinking={"type": "adaptive"})
        events, message = await streamed(client, **fields, thinking={"type": "adaptive"})
        assert comparable(message) == comparable(whole)
        thinking = whole.content[0]
        assert thinking.type == "thinking"
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
        assert "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta") == thinking.thinking
        quick = await client.messages.create(**fields, thinking={"type": "disabled"})
        (text,) = quick.content
        assert text.type == "text"
        assert text.text in ("true", "false")
        wrong: Any = {"format": {"type": "json_schema", "schema": {"type": "no type"}}}
        with pytest.raises(anthropic.BadRequestError) as raised:
            await client.messages.create(**LIMITS, output_config=wrong)
        assert raised.value.body["error"]["param"] == "output_config"  # type: ignore[index]


async def test_tokens_are_counted_without_sampling() -> None:
    """As many as the message of the same conversation reports."""
    async with serving(HERMES) as client:
        fields = {name: LIMITS[name] for name in ("model", "messages")} | {"system": "Be brief.", "tools": TOOLS}
        counted = await client.messages.count_tokens(**fields)
        answer = await client.messages.create(**fields, max_tokens=1)
        assert counted.input_tokens == answer.usage.input_tokens


async def test_the_client_raises_the_error_of_a_status() -> None:
    """With Anthropic's type of error. The key is sent in `x-api-key`, or as a bearer token."""
    import anthropic

    async with running_server.serving(api_key="secret") as served:
        async with client_of(served.url) as client:
            with pytest.raises(anthropic.AuthenticationError) as denied:
                await client.messages.create(**LIMITS)
            assert denied.value.type == "authentication_error"
        async with client_of(served.url, api_key="secret") as client:
            with pytest.raises(anthropic.NotFoundError) as absent:
                await client.messages.create(**LIMITS | {"model": "other"})
            assert absent.value.type == "not_found_error"
        async with client_of(served.url, api_key=None, auth_token="secret") as client:
            assert (await client.messages.create(**LIMITS | {"max_tokens": 1})).content


@pytest.mark.parametrize(("stopped", "error"), [(False, "api_error"), (True, "overloaded_error")])
async def test_an_error_during_a_stream_is_raised_by_the_client(stopped: bool, error: str) -> None:
    """It is the last event, also at the end of the server: the tokens so far are not taken for the whole message."""
    import anthropic

    async with running_server.serving(shutdown_seconds=0.0) as served, client_of(served.url) as client:
        served.engine.allow(2)
        fields = LIMITS | {"extra_body": {"ignore_eos": True}, "max_tokens": 8}
        stream = await client.messages.create(**fields, stream=True)
        assert (await anext(stream)).type == "message_start"
        if stopped:
            served.stop()
        else:
            served.engine.fail("broken")
        with pytest.raises(anthropic.APIStatusError) as raised:
            [event async for event in stream]
        assert raised.value.type == error


async def test_a_message_can_be_aborted_by_its_id() -> None:
    """It has paused, with the tokens so far, and can be continued."""
    async with running_server.serving() as served, client_of(served.url) as client:
        served.engine.allow(2)
        fields = LIMITS | {"extra_body": {"ignore_eos": True}, "max_tokens": 200}
        last: Any = None
        async for event in await client.messages.create(**fields, stream=True):
            if event.type == "message_start":
                aborted = await served.post("/abort_requests", request_ids=[event.message.id])
                assert aborted.status_code == 200, aborted.text
                served.engine.allow(100)
            last = event if event.type == "message_delta" else last
        assert last.delta.stop_reason == "pause_turn"
        assert 0 < last.usage.output_tokens < 200
