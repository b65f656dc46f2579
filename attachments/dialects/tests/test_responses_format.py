"""Responses of /v1/responses, whole and streamed, with OpenAI's client and a model of random weights."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, BaseModel
from openai.types.responses import Response

from tests.fakes import CharacterTokenizer
from tests.serving import running_server
from tests.serving.test_chat_features import HERMES, SCHEMA, TEMPLATES, THINKING
from tests.serving.test_with_engine import serving

FUNCTIONS: list[Any] = [
    {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "no_arguments", "parameters": None, "strict": None},
]
LIMITS: dict[str, Any] = {
    "model": "policy", "input": "Hi", "max_output_tokens": 400, "temperature": 0.7, "extra_body": {"seed": 3},
}  # fmt: skip


def comparable(response: Response) -> dict[str, Any]:
    """Return a response without what differs between two requests: its time and its random names."""
    fields: dict[str, Any] = response.to_dict()
    for item in fields["output"]:
        del item["id"]
        item.pop("call_id", None)
    return {name: value for name, value in fields.items() if name not in ("id", "created_at")}


async def streamed(client: AsyncOpenAI, **fields: Any) -> tuple[list[Any], Response]:
    """Return the events of a stream and the response that its last event contains; check the rules of every stream."""
    events: list[Any] = [event async for event in await client.responses.create(**fields, stream=True)]
    names = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert names[:2] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{last.response.status}"
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.response.id}
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [event.output_index for event in done] == list(range(len(added)))
    assert [event.item.id for event in added] == [event.item.id for event in done]
    return events, last.response


async def test_a_response_contains_text_usage_and_the_policy_version() -> None:
    """The fields of the request are repeated; a response that reaches its limit is incomplete."""
    async with running_server.serving() as served:
        answer: Any = await served.openai.responses.create(
            model="policy", input="2+2?", max_output_tokens=4, temperature=0.5, truncation="auto",
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        request = served.engine.requests[0]
        assert request.prompt == CharacterTokenizer().render_chat([{"role": "user", "content": "2+2?"}])
        assert answer.id == f"resp_{request.request_id}"
        assert (answer.object, answer.status, answer.model) == ("response", "incomplete", "policy")
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert (answer.temperature, answer.max_output_tokens, answer.tools) == (0.5, 4, [])
        assert answer.truncation == "auto"
        assert answer.reasoning is not None
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(request.prompt), 4)
        assert answer.usage.total_tokens == len(request.prompt) + 4
        (message,) = answer.output
        assert (message.type, message.status) == ("message", "incomplete")
        assert answer.output_text
        extra = answer.model_extra or {}
        assert (extra["weights_version"], extra["system_fingerprint"]) == (3, "f3")
        assert extra["weights_versions"] == {"first": 3, "last": 3}


async def test_a_stream_of_text_ends_with_the_whole_response() -> None:
    """Deltas, joined, are the text; the log-probabilities of the deltas are those of the message."""
    fields = LIMITS | {"max_output_tokens": 12, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    async with serving() as (_, client):
        whole: Any = await client.responses.create(**fields)
        events, response = await streamed(client, **fields)
    assert comparable(response) == comparable(whole)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (message,) = whole.output
    (part,) = message.content
    assert part.type == "output_text"
    assert "".join(event.delta for event in deltas) == part.text
    assert part.logprobs is not None
    assert len(part.logprobs) == 12
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in part.logprobs]
    assert [event.type for event in events[2:4]] == ["response.output_item.added", "response.content_part.added"]
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip


@pytest.mark.parametrize("template", ["hermes", "pythonic"])
async def test_a_call_is_an_item_whose_arguments_are_streamed(template: str) -> None:
    """`required` for each format of calls, and a named function."""
    named = [{"type": "function", "name": "f"}] if template == "hermes" else []
    async with serving(TEMPLATES[template]) as (_, client):
        for choice in ("required", *named):
            fields: dict[str, Any] = {"tools": FUNCTIONS, "tool_choice": choice, "parallel_tool_calls": False}
            whole: Any = await client.responses.create(**LIMITS, **fields)
            events, response = await streamed(client, **LIMITS, **fields)
            assert comparable(response) == comparable(whole)
            assert whole.status == "completed"
            (call,) = whole.output
            assert call.type == "function_call"
            assert call.name == "f" or choice == "required"
            jsonschema.validate(json.loads(call.arguments), SCHEMA if call.name == "f" else {})
            deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
            assert ["".join(deltas)] == done == [call.arguments]


async def test_the_output_of_a_response_is_valid_input_with_the_result_of_its_call() -> None:
    """The items of the response are sent back as they are."""
    async with serving(HERMES) as (_, client):
        fields: dict[str, Any] = {"tools": FUNCTIONS[1:], "parallel_tool_calls": False}
        first: Any = await client.responses.create(
            **LIMITS | {"max_output_tokens": 100}, **fields, tool_choice="required"
        )
        (call,) = first.output
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "42 degrees"}
        items: Any = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in first.output), result]
        second: Any = await client.responses.create(**{**LIMITS, "input": items, "max_output_tokens": 1}, **fields)
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + len("42 degrees")


async def test_reasoning_is_an_item_before_the_message() -> None:
    """Its tokens are counted; the format constrains the message only."""
    fields: dict[str, Any] = {**LIMITS, "max_output_tokens": 80, "extra_body": {"seed": 3, "guided_regex": "[ab]{4}"}}
    async with serving(THINKING) as (_, client):
        whole: Any = await client.responses.create(**fields, reasoning={"effort": "low"})
        events, response = await streamed(client, **fields, reasoning={"effort": "low"})
        assert comparable(response) == comparable(whole)
        reasoning = whole.output[0]
        assert reasoning.type == "reasoning"
        assert reasoning.content
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == reasoning.content[0].text
        assert whole.usage is not None
        assert 0 < whole.usage.output_tokens_details.reasoning_tokens <= whole.usage.output_tokens
        quick: Any = await client.responses.create(**fields, reasoning={"effort": "none"})
        assert [item.type for item in quick.output] == ["message"]


class Answer(BaseModel):
    """The schema of an answer, as users of the client write it."""

    n: int
    ok: bool


async def test_the_helpers_of_the_client_parse_messages_and_calls() -> None:
    """`parse` with a class, and `stream` with a strict function."""
    function: Any = openai.pydantic_function_tool(Answer, name="answer")
    async with serving(TEMPLATES["hermes"]) as (_, client):
        parsed = await client.responses.parse(**LIMITS, text_format=Answer)
        assert isinstance(parsed.output_parsed, Answer)
        required: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
        async with client.responses.stream(**LIMITS, tools=[function], **required) as stream:
            kinds = {event.type async for event in stream}
            (call, *_) = (await stream.get_final_response()).output
        assert {"response.function_call_arguments.delta", "response.completed"} <= kinds
        assert call.type == "function_call"
        assert isinstance(call.parsed_arguments, Answer)


async def test_a_format_is_a_json_object_or_has_a_usable_schema() -> None:
    """A schema that cannot be compiled is an error of the field `text`."""
    wrong: Any = {"type": "json_schema", "name": "a", "schema": {"type": "no type"}}
    async with serving() as (_, client):
        with pytest.raises(openai.BadRequestError) as raised:
            await client.responses.create(**LIMITS, text={"format": wrong})
        assert raised.value.param == "text"
        answer: Any = await client.responses.create(**LIMITS, text={"format": {"type": "json_object"}})
        if answer.status == "completed":
            assert isinstance(json.loads(answer.output_text), dict)
        assert answer.output_text.lstrip().startswith("{")


async def test_a_response_can_be_aborted_by_its_id() -> None:
    """It is incomplete, with the tokens so far."""
    async with running_server.serving() as served:
        served.engine.allow(2)
        stream = await served.openai.responses.create(
            model="policy", input="a", max_output_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        last: Any = None
        async for event in stream:
            if last is None:
                created: Any = event
                aborted = await served.post("/abort_requests", request_ids=[created.response.id])
                assert aborted.status_code == 200, aborted.text
                served.engine.allow(100)
            last = event
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "abort"
        assert 0 < last.response.usage.output_tokens < 200


async def test_an_error_during_a_stream_is_its_last_event() -> None:
    """The response failed; the message says why."""
    async with running_server.serving() as served:
        served.engine.allow(2)
        stream = await served.openai.responses.create(
            model="policy", input="a", max_output_tokens=8, stream=True, extra_body={"ignore_eos": True}
        )
        names = list[str]()
        async for event in stream:
            if not names:
                served.engine.fail("broken")
            names.append(event.type)
            last: Any = event
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.message
