"""The OpenAI endpoints, used with OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.fakes import END, CharacterTokenizer
from tests.serving.running_server import CONTEXT, serving

USER: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "2+2?"}]


async def test_a_chat_completion_contains_the_policy_version() -> None:
    """Text, usage, finish reason, version and fingerprint come from the engine."""
    async with serving() as served:
        answer = await served.openai.chat.completions.create(model="policy", messages=USER, seed=1, max_tokens=8)
        asked = served.engine.requests[0]
        prompt = CharacterTokenizer().render_chat(USER)
        assert asked.prompt == prompt
        assert answer.id.startswith("chatcmpl-")
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.total_tokens == len(prompt) + answer.usage.completion_tokens
        assert answer.system_fingerprint == "f3"
        extra = answer.model_extra or {}
        assert extra["weights_version"] == 3
        assert (answer.choices[0].model_extra or {})["weights_versions"] == {"first": 3, "last": 3}


async def test_choices_are_ordered_by_prompt() -> None:
    """Choice i * n + j equals completion j of a request with prompt i only."""
    async with serving() as served:
        client = served.openai.completions
        both = await client.create(model="policy", prompt=["one", "two"], n=3, seed=5, max_tokens=6)
        alone = [await client.create(model="policy", prompt=text, n=3, seed=5, max_tokens=6) for text in ("one", "two")]
        assert [choice.index for choice in both.choices] == list(range(6))
        assert [choice.text for choice in both.choices] == [one.text for answer in alone for one in answer.choices]
        assert len({choice.text for choice in both.choices}) == 6


async def test_a_prompt_can_be_text_or_tokens() -> None:
    """The four forms of `prompt` are equivalent."""
    tokens = list(CharacterTokenizer().encode("abc"))
    async with serving() as served:
        texts = set()
        for prompt in ("abc", ["abc"], tokens, [tokens]):
            answer = await served.openai.completions.create(model="policy", prompt=prompt, seed=1, max_tokens=5)
            texts.add(answer.choices[0].text)
        assert len(texts) == 1
        assert {asked.prompt for asked in served.engine.requests} == {tuple(tokens)}


async def test_only_a_request_with_a_seed_is_reproducible() -> None:
    """Without a seed, every prompt gets a random seed."""
    async with serving() as served:
        client = served.openai.completions
        seeded = [await client.create(model="policy", prompt="x", seed=9, max_tokens=12) for _ in range(2)]
        unseeded = [await client.create(model="policy", prompt=["x", "x"], max_tokens=12) for _ in range(2)]
        assert seeded[0].choices[0].text == seeded[1].choices[0].text
        assert len({choice.text for answer in unseeded for choice in answer.choices}) == 4


@pytest.mark.parametrize("chat", [True, False])
async def test_a_stream_equals_the_whole_response(chat: bool) -> None:
    """The last chunk contains the usage and no choices."""
    fields = {"model": "policy", "n": 3, "seed": 4, "max_tokens": 40, "stop": ["ab", "Q"]}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with serving() as served:
        client = served.openai
        create = client.chat.completions.create if chat else client.completions.create
        what = {"messages": USER} if chat else {"prompt": "hello"}
        whole = await create(**fields, **what)  # type: ignore[call-overload]
        texts = {0: "", 1: "", 2: ""}
        reasons = {}
        chunks = [chunk async for chunk in await create(**fields, **streamed, **what)]  # type: ignore[call-overload]
        for chunk in chunks[:-1]:
            assert chunk.usage is None
            for choice in chunk.choices:
                texts[choice.index] += (choice.delta.content or "") if chat else choice.text
                reasons[choice.index] = choice.finish_reason
        assert texts == {one.index: one.message.content if chat else one.text for one in whole.choices}
        assert reasons == {one.index: one.finish_reason for one in whole.choices}
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage


async def test_a_stream_contains_log_probabilities_and_tokens() -> None:
    """They equal those of the whole response."""
    body = {"return_token_ids": True}
    async with serving() as served:
        create = served.openai.chat.completions.create
        whole = await create(
            model="policy", messages=USER, seed=2, max_tokens=9, logprobs=True, top_logprobs=3, extra_body=body
        )
        entries, tokens, prompts = [], [], []
        async for chunk in await create(
            model="policy",
            messages=USER,
            seed=2,
            max_tokens=9,
            logprobs=True,
            top_logprobs=3,
            extra_body=body,
            stream=True,
        ):
            entries += chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else []
            tokens += (chunk.choices[0].model_extra or {})["token_ids"]
            prompts.append((chunk.model_extra or {}).get("prompt_token_ids"))
        assert whole.choices[0].logprobs is not None
        assert entries == whole.choices[0].logprobs.content
        assert [len(entry.top_logprobs) for entry in entries] == [3] * len(entries)
        assert tokens == (whole.choices[0].model_extra or {})["token_ids"]
        assert prompts[0] == (whole.model_extra or {})["prompt_token_ids"]
        assert set(prompts[1:]) == {None}


async def test_log_probabilities_of_completions_are_parallel_lists() -> None:
    """One entry per token; `top_logprobs` contains the sampled token; offsets count token texts."""
    async with serving() as served:
        create = served.openai.completions.create
        for alternatives in (0, 2):
            answer = await create(model="policy", prompt="p", seed=3, max_tokens=6, logprobs=alternatives)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.tokens is not None
            assert logprobs.token_logprobs is not None
            assert logprobs.top_logprobs is not None
            assert "".join(logprobs.tokens).removesuffix("<end>") == answer.choices[0].text
            assert logprobs.text_offset == [
                sum(len(text) for text in logprobs.tokens[:at]) for at in range(len(logprobs.tokens))
            ]
            for text, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
                assert top[text] == value
                assert len(top) == max(alternatives, 1)


@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_continue_across_the_chunks_of_a_stream(echo: bool) -> None:
    """The concatenated lists of all chunks equal those of the whole response, also behind a repeated prompt."""
    async with serving() as served:
        create = served.openai.completions.create
        fields = {"model": "policy", "prompt": "pq", "seed": 3, "max_tokens": 9, "logprobs": 2, "echo": echo}
        whole = (await create(**fields)).choices[0].logprobs  # type: ignore[call-overload]
        offsets, values = [], []
        async for chunk in await create(**fields, stream=True):  # type: ignore[call-overload]
            offsets += chunk.choices[0].logprobs.text_offset
            values += chunk.choices[0].logprobs.token_logprobs
        assert (offsets, values) == (whole.text_offset, whole.token_logprobs)


async def test_a_stop_string_ends_the_text() -> None:
    """The text does not contain the stop string; `stop_reason` does."""
    async with serving() as served:
        create = served.openai.completions.create
        free = await create(model="policy", prompt="p", seed=8, max_tokens=30, extra_body={"ignore_eos": True})
        stop = free.choices[0].text[10:12]
        answer = await create(model="policy", prompt="p", seed=8, max_tokens=30, stop=[stop, ""])
        assert answer.choices[0].text == free.choices[0].text.split(stop)[0]
        assert answer.choices[0].finish_reason == "stop"
        assert (answer.choices[0].model_extra or {})["stop_reason"] == stop


async def test_every_sampling_parameter_reaches_the_engine() -> None:
    """A top_k of the vocabulary size keeps all tokens."""
    async with serving() as served:
        await served.openai.completions.create(
            model="policy",
            prompt="p",
            temperature=0.5,
            top_p=0.9,
            logit_bias={"7": -3},
            max_tokens=4,
            stop="zz",
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            extra_body={
                "min_tokens": 2, "allowed_token_ids": [5, 6], "bad_words": ["ab", " c"], "top_k": 10**9, "min_p": 0.1,
                "repetition_penalty": 1.2, "ignore_eos": True, "stop_token_ids": [END],
            },
        )  # fmt: skip
        sampling = served.engine.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
        assert (sampling.top_k, sampling.repetition_penalty) == (0, 1.2)
        assert (sampling.logit_bias, sampling.stop) == (((7, -3.0),), ("zz",))
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_tokens) == (0.25, -0.5, 2)
        assert sampling.allowed_token_ids == (5, 6)
        assert sampling.bad_words == (served.engine.tokenizer.encode("ab"), served.engine.tokenizer.encode("c"))
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.max_tokens) == ((END,), True, 4)


async def test_the_default_max_tokens_fits_the_context() -> None:
    """The default is limited to the rest of the context."""
    async with serving() as served:
        await served.openai.completions.create(model="policy", prompt=[1] * (CONTEXT - 3), extra_body={"top_k": 1})
        assert served.engine.requests[0].sampling.max_tokens == 3


async def test_a_choice_contains_the_versions_before_and_after_a_weight_swap() -> None:
    """The versions of the first and of the last token."""
    async with serving() as served:
        served.engine.allow(3)
        stream = await served.openai.completions.create(
            model="policy", prompt="p", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
        )
        versions = []
        async for chunk in stream:
            versions.append((chunk.choices[0].model_extra or {})["weights_versions"])
            if len(versions) == 3:
                served.engine.version = 4
                served.engine.allow(100)
        assert versions[0] == {"first": 3, "last": 3}
        assert versions[-1] == {"first": 3, "last": 4}


async def test_the_list_of_models_contains_the_policy() -> None:
    """Its name is `server.model_name`; its length is that of the context."""
    async with serving(model_name="my-policy") as served:
        models = (await served.openai.models.list()).data
        assert [model.id for model in models] == ["my-policy"]
        assert (models[0].model_extra or {})["max_model_len"] == CONTEXT
        assert await served.openai.models.retrieve("my-policy") == models[0]
        with pytest.raises(openai.NotFoundError):
            await served.openai.models.retrieve("no/such model")
        with pytest.raises(openai.NotFoundError) as caught:
            await served.openai.completions.create(model="policy", prompt="x")
        assert caught.value.param == "model"


async def test_fields_of_vllm_work_through_extra_body() -> None:
    """Prompts are repeated and scored, and tokens are named by their ids, whole and streamed."""
    body = {"prompt_logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    fields: dict[str, Any] = {"model": "policy", "prompt": "abc", "seed": 1, "max_tokens": 3, "logprobs": 1}
    async with serving() as served:
        create = served.openai.completions.create
        answer = await create(**fields, echo=True, extra_body=body)
        (choice,) = answer.choices
        extra = choice.model_extra or {}
        assert choice.text.startswith("abc")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        named = [int(text.removeprefix("token_id:")) for text in choice.logprobs.tokens]
        assert named[-len(extra["token_ids"]) :] == extra["token_ids"]
        assert [position is None for position in extra["prompt_logprobs"]] == [True, False, False]
        texts = [chunk.choices[0].text async for chunk in await create(**fields, echo=True, stream=True)]
        assert "".join(texts) == choice.text


async def test_a_conversation_has_roles_parts_and_limits_of_the_api() -> None:
    """`developer`, a list of text parts, and `max_completion_tokens`."""
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},
    ]
    async with serving() as served:
        answer = await served.openai.chat.completions.create(
            model="policy", messages=messages, max_completion_tokens=2, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
        rendered = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
        assert served.engine.requests[0].prompt == CharacterTokenizer().render_chat(rendered)


async def test_the_model_is_optional() -> None:
    """The server has one model."""
    async with serving() as served:
        assert (await served.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200
