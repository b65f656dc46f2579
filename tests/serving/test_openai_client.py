"""The API as OpenAI's own client sees it."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.fakes import END, CharacterTokenizer
from tests.serving.running_server import CONTEXT, serving

USER: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "2+2?"}]


async def test_a_chat_is_answered_by_the_policy_and_names_its_weights() -> None:
    """Text, usage, reason, version and fingerprint are those of the engine."""
    async with serving() as served:
        answer = await served.openai.chat.completions.create(model="policy", messages=USER, seed=1, max_tokens=8)
        asked = served.engine.asked[0]
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


async def test_choices_of_many_prompts_are_numbered_prompt_by_prompt() -> None:
    """Choice i * n + j is completion j of prompt i, as if each prompt had been asked alone."""
    async with serving() as served:
        client = served.openai.completions
        both = await client.create(model="policy", prompt=["one", "two"], n=3, seed=5, max_tokens=6)
        alone = [await client.create(model="policy", prompt=text, n=3, seed=5, max_tokens=6) for text in ("one", "two")]
        assert [choice.index for choice in both.choices] == list(range(6))
        assert [choice.text for choice in both.choices] == [one.text for answer in alone for one in answer.choices]
        assert len({choice.text for choice in both.choices}) == 6


async def test_prompts_may_be_text_or_tokens() -> None:
    """The four forms of `prompt` mean the same tokens."""
    tokens = list(CharacterTokenizer().encode("abc"))
    async with serving() as served:
        texts = set()
        for prompt in ("abc", ["abc"], tokens, [tokens]):
            answer = await served.openai.completions.create(model="policy", prompt=prompt, seed=1, max_tokens=5)
            texts.add(answer.choices[0].text)
        assert len(texts) == 1
        assert {asked.prompt for asked in served.engine.asked} == {tuple(tokens)}


async def test_a_seed_makes_an_answer_reproducible_and_its_absence_does_not() -> None:
    """Equal seeds, equal choices; without one every request is new."""
    async with serving() as served:
        client = served.openai.completions
        seeded = [await client.create(model="policy", prompt="x", seed=9, max_tokens=12) for _ in range(2)]
        unseeded = [await client.create(model="policy", prompt=["x", "x"], max_tokens=12) for _ in range(2)]
        assert seeded[0].choices[0].text == seeded[1].choices[0].text
        assert len({choice.text for answer in unseeded for choice in answer.choices}) == 4


@pytest.mark.parametrize("chat", [True, False])
async def test_a_stream_equals_the_whole_answer(chat: bool) -> None:
    """The deltas of every choice add up, and usage comes last, with no choices."""
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


async def test_a_stream_carries_log_probabilities_and_tokens() -> None:
    """Streamed log-probabilities and token identifiers equal those of the whole answer."""
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


async def test_completions_report_log_probabilities_as_parallel_lists() -> None:
    """One entry per token; the sampled token is among its alternatives; offsets follow the token texts."""
    async with serving() as served:
        create = served.openai.completions.create
        for asked in (0, 2):
            answer = await create(model="policy", prompt="p", seed=3, max_tokens=6, logprobs=asked)
            told = answer.choices[0].logprobs
            assert told is not None
            assert told.tokens is not None
            assert told.token_logprobs is not None
            assert told.top_logprobs is not None
            assert "".join(told.tokens).removesuffix("<end>") == answer.choices[0].text
            assert told.text_offset == [sum(len(text) for text in told.tokens[:at]) for at in range(len(told.tokens))]
            for text, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
                assert top[text] == value
                assert len(top) == max(asked, 1)


async def test_streamed_completions_keep_count_of_their_offsets() -> None:
    """The parallel lists of all chunks, put together, are those of the whole answer."""
    async with serving() as served:
        create = served.openai.completions.create
        fields = {"model": "policy", "prompt": "p", "seed": 3, "max_tokens": 9, "logprobs": 2}
        whole = (await create(**fields)).choices[0].logprobs  # type: ignore[call-overload]
        offsets, values = [], []
        async for chunk in await create(**fields, stream=True):  # type: ignore[call-overload]
            offsets += chunk.choices[0].logprobs.text_offset
            values += chunk.choices[0].logprobs.token_logprobs
        assert (offsets, values) == (whole.text_offset, whole.token_logprobs)


async def test_stop_strings_end_the_text_and_are_named() -> None:
    """The stop string is not part of the text; `stop_reason` says which one it was."""
    async with serving() as served:
        create = served.openai.completions.create
        free = await create(model="policy", prompt="p", seed=8, max_tokens=30, extra_body={"ignore_eos": True})
        stop = free.choices[0].text[10:12]
        answer = await create(model="policy", prompt="p", seed=8, max_tokens=30, stop=[stop, ""])
        assert answer.choices[0].text == free.choices[0].text.split(stop)[0]
        assert answer.choices[0].finish_reason == "stop"
        assert (answer.choices[0].model_extra or {})["stop_reason"] == stop


async def test_every_sampling_field_reaches_the_engine() -> None:
    """What the client says is what the engine is asked."""
    async with serving() as served:
        await served.openai.completions.create(
            model="policy",
            prompt="p",
            temperature=0.5,
            top_p=0.9,
            logit_bias={"7": -3},
            max_tokens=4,
            stop="zz",
            extra_body={
                "top_k": 10**9,
                "min_p": 0.1,
                "repetition_penalty": 1.2,
                "ignore_eos": True,
                "stop_token_ids": [END],
            },
        )
        sampling = served.engine.asked[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
        assert (sampling.top_k, sampling.repetition_penalty) == (0, 1.2)
        assert (sampling.logit_bias, sampling.stop) == (((7, -3.0),), ("zz",))
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.max_tokens) == ((END,), True, 4)


async def test_without_max_tokens_the_answer_fits_the_context() -> None:
    """The default limit shrinks to what the context leaves."""
    async with serving() as served:
        await served.openai.completions.create(model="policy", prompt=[1] * (CONTEXT - 3), extra_body={"top_k": 1})
        assert served.engine.asked[0].sampling.max_tokens == 3


async def test_a_choice_drawn_across_a_swap_says_so() -> None:
    """First and last version differ where the weights changed in between."""
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


async def test_the_models_route_names_the_policy() -> None:
    """One model, by the name in the profile, with the length of its context."""
    async with serving(model_name="my-policy") as served:
        models = (await served.openai.models.list()).data
        assert [model.id for model in models] == ["my-policy"]
        assert (models[0].model_extra or {})["max_model_len"] == CONTEXT
        with pytest.raises(openai.NotFoundError) as caught:
            await served.openai.completions.create(model="policy", prompt="x")
        assert caught.value.param == "model"


async def test_the_model_may_be_left_out() -> None:
    """There is only one."""
    async with serving() as served:
        assert (await served.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200
