"""Prompts in responses: `echo`, `prompt_logprobs`, and the options beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clotho.serving.openai_responses import prompt_positions
from protocols.sampling import PromptLogprobs
from tests.fakes import CharacterTokenizer
from tests.serving.running_server import CONTEXT, Served, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
IDS = list(CharacterTokenizer().encode("abc"))
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I think "}]


async def ok(served: Served, route: str, **fields: Any) -> Any:
    """Return the body of a successful response."""
    answer = await served.post(route, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_echo_repeats_the_prompt_before_the_completion() -> None:
    """Of text and of tokens, for each choice."""
    async with serving() as served:
        plain = await ok(served, TEXT, prompt=["abc", "de"], n=2, seed=1, max_tokens=4)
        echoed = await ok(served, TEXT, prompt=["abc", "de"], n=2, seed=1, max_tokens=4, echo=True)
        prompts = ["abc", "abc", "de", "de"]
        assert [choice["text"] for choice in echoed["choices"]] == [
            prompt + choice["text"] for prompt, choice in zip(prompts, plain["choices"], strict=True)
        ]
        tokens = await ok(served, TEXT, prompt=IDS, seed=1, max_tokens=4, echo=True)
        assert tokens["choices"][0]["text"].startswith("abc")
        assert served.scored == []


async def test_echo_with_logprobs_scores_the_prompt() -> None:
    """The first token has no log-probability; offsets count the characters of the prompt."""
    async with serving() as served:
        answer = await ok(served, TEXT, prompt="abc", seed=1, max_tokens=2, echo=True, logprobs=2, ignore_eos=True)
        found = answer["choices"][0]["logprobs"]
        assert served.scored == [(tuple(IDS), 2)]
        assert found["tokens"][:3] == ["a", "b", "c"]
        assert found["token_logprobs"][:3] == [None, -IDS[1] / 8, -IDS[2] / 8]
        assert found["top_logprobs"][0] is None
        assert [len(position) for position in found["top_logprobs"][1:]] == [2, 2, 2, 2]
        assert found["text_offset"] == [0, 1, 2, 3, 4]


async def test_a_prompt_is_scored_without_sampling() -> None:
    """`max_tokens: 0` with `echo` returns the prompt alone."""
    async with serving() as served:
        answer = await ok(served, TEXT, prompt=["abc", "de"], max_tokens=0, echo=True, logprobs=0)
        assert [choice["text"] for choice in answer["choices"]] == ["abc", "de"]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -IDS[1] / 8, -IDS[2] / 8]
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
        assert served.engine.requests == []


async def test_a_stream_repeats_the_prompt_once() -> None:
    """In the first chunk of each choice."""
    async with serving() as served:
        fields = {"prompt": "abc", "seed": 1, "max_tokens": 5, "echo": True, "logprobs": 0, "n": 2}
        whole = await ok(served, TEXT, **fields)
        answer = await served.post(TEXT, **fields, stream=True)
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: {")]
        choices = [json.loads(event)["choices"][0] for event in events]
        for index in range(2):
            mine = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in mine) == whole["choices"][index]["text"]
            tokens = [token for choice in mine for token in choice["logprobs"]["tokens"]]
            assert tokens == whole["choices"][index]["logprobs"]["tokens"]


async def test_prompt_logprobs_are_part_of_each_choice_and_of_a_conversation() -> None:
    """Format of vLLM: one object per token after the first."""
    async with serving() as served:
        text = await ok(served, TEXT, prompt=["abc", "de"], max_tokens=1, prompt_logprobs=1)
        first, second = (choice["prompt_logprobs"] for choice in text["choices"])
        assert (len(first), len(second), first[0]) == (3, 2, None)
        assert first[1] == {str(IDS[1]): {"logprob": -IDS[1] / 8, "rank": 1, "decoded_token": "b"}}
        chat = await ok(served, CHAT, messages=TALK, max_tokens=1, prompt_logprobs=0)
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        plain = await ok(served, CHAT, messages=TALK, max_tokens=1)
        assert "prompt_logprobs" not in plain


async def test_a_conversation_echoes_the_turn_of_the_assistant() -> None:
    """Only if the last message is the assistant's."""
    async with serving() as served:
        echoed = await ok(served, CHAT, messages=TALK, max_tokens=4, seed=1, echo=True)
        assert echoed["choices"][0]["message"]["content"].startswith("I think ")
        other = await ok(served, CHAT, messages=TALK[:1], max_tokens=4, seed=1, echo=True)
        assert not other["choices"][0]["message"]["content"].startswith("hi")


async def test_tokens_are_named_by_their_ids() -> None:
    """`return_tokens_as_token_ids` keeps tokens apart whose text is equal."""
    async with serving() as served:
        common = {"max_tokens": 3, "ignore_eos": True, "return_tokens_as_token_ids": True, "return_token_ids": True}
        chat = await ok(served, CHAT, messages=TALK, logprobs=True, top_logprobs=1, **common)
        (choice,) = chat["choices"]
        names = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert names == [f"token_id:{token}" for token in choice["token_ids"]]
        text = await ok(served, TEXT, prompt="abc", logprobs=1, **common)
        (choice,) = text["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


async def test_a_prompt_is_truncated_from_the_left() -> None:
    """-1 keeps as many tokens as fit into the context beside one sampled token."""
    async with serving() as served:
        await ok(served, TEXT, prompt="abcdef", truncate_prompt_tokens=2, max_tokens=1)
        assert served.engine.requests[-1].prompt == CharacterTokenizer().encode("ef")
        await ok(served, TEXT, prompt=[1] * (CONTEXT + 50), truncate_prompt_tokens=-1, max_tokens=1)
        assert len(served.engine.requests[-1].prompt) == CONTEXT - 1
        await ok(served, CHAT, messages=TALK, truncate_prompt_tokens=4, max_tokens=1)
        assert len(served.engine.requests[-1].prompt) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"), ({"echo": 1}, "echo"),
        ({"request_id": "x" * 65}, "request_id"), ({"prompt": [[97]], "echo": True}, "prompt"),
    ],
)  # fmt: skip
async def test_an_invalid_option_is_refused(fields: dict[str, Any], param: str) -> None:
    """The error names the field."""
    async with serving() as served:
        answer = await served.post(TEXT, **({"prompt": "abc"} | fields))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_a_token_and_its_alternatives_are_one_table() -> None:
    """With the rank of each that is among the best; a token that is not has none."""
    best = (((98, -1.0), (99, -2.0)), ((97, -0.5), (98, -1.5)))
    scored = PromptLogprobs(version=0, logprobs=(-1.0, -9.0), top_logprobs=best)
    _, *found = prompt_positions((97, 98, 99), scored, CharacterTokenizer(), top=2)
    ranks = [{token: (one.logprob, one.rank) for token, one in (position or {}).items()} for position in found]
    assert ranks == [{98: (-1.0, 1), 99: (-2.0, 2)}, {99: (-9.0, None), 97: (-0.5, 1), 98: (-1.5, 2)}]
