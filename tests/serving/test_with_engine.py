"""The HTTP server with the real engine, compute thread and sampler, and a tiny model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

import anyio
import httpx
import mlx.core as mx
import numpy as np
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute
from clotho.lanes.sampling_client import EngineSampler
from clotho.serving.server import ApiServer
from clotho.serving.services import HealthReport, ServedModel, ServerContext
from clotho.settings.engine import EngineSection
from clotho.settings.server import HttpServer
from protocols.sampling import PromptLogprobs, Sampling
from protocols.step import WeightsReady
from tests.small_models import FixedSource, byte_tokenizer, tiny_source

TEMPLATE = (
    "{% if mood %}mood: {{ mood }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Stack:
    """The engine and its compute thread."""

    def __init__(self, template: str = TEMPLATE, architecture: str = "qwen3") -> None:
        self.compute = Compute(decode_share=0.5, slots=2)
        self.compute.start()
        self.source: FixedSource = self.compute.decode.submit(lambda: tiny_source(architecture)).result()
        self.source.tokenizer = byte_tokenizer(chat_template=template)
        self.engine = self.compute.decode.submit(lambda: DecodeEngine(self.source, EngineSection())).result()
        self.compute.decode.attach(self.engine)

    async def rows(self) -> int:
        """Return the number of completions in the engine."""
        stats = await anyio.to_thread.run_sync(self.compute.decode.submit(self.engine.stats).result)
        return stats.running_rows + stats.waiting_rows


def base_weights() -> WeightsReady:
    """Return the version of the weights, which never changes."""
    return WeightsReady(version=0, step=0, fingerprint="base")


async def unused_prompt_logprobs(_: tuple[int, ...], __: int, ___: str) -> PromptLogprobs:
    """Fail: the OpenAI endpoints do not score prompts."""
    raise NotImplementedError


def services_of(stack: Stack) -> ServerContext:
    """Return the server context of a tiny model."""
    return ServerContext(
        sampler=EngineSampler(stack.compute.decode.submit, stack.engine),
        tokenizer=stack.source.tokenizer,
        settings=HttpServer(port=0, shutdown_seconds=1.0),
        sampling=Sampling(max_tokens=32),
        prompt_logprobs=unused_prompt_logprobs,
        weights=base_weights,
        models=lambda: (ServedModel(id="policy", root="policy", weights=base_weights),),
        health=lambda: HealthReport(status="ok"),
        context_length=stack.source.context_length,
        vocab_size=stack.source.vocab_size,
    )


@asynccontextmanager
async def serving(template: str = TEMPLATE, architecture: str = "qwen3") -> AsyncIterator[tuple[Stack, AsyncOpenAI]]:
    """Serve a tiny model."""
    stack = Stack(template, architecture)
    services = services_of(stack)
    try:
        async with anyio.create_task_group() as tasks:
            url = await tasks.start(ApiServer(services).run)
            http = DefaultAsyncHttpxClient(verify=False)  # certificates take as long to load as the server to start
            async with AsyncOpenAI(
                base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=30, http_client=http
            ) as client:
                yield stack, client
            tasks.cancel_scope.cancel()
    finally:
        stack.compute.stop()


async def test_a_stream_equals_the_whole_response_of_a_model() -> None:
    """Text, tokens and log-probabilities, greedy and sampled, including incomplete characters."""
    async with serving() as (_, client):
        for temperature in (0.0, 1.0):
            fields = {
                "model": "policy", "messages": [{"role": "user", "content": "héllo"}], "n": 3, "seed": 7,
                "max_tokens": 24, "temperature": temperature, "logprobs": True, "top_logprobs": 2,
                "extra_body": {"return_token_ids": True},
            }  # fmt: skip
            whole = await client.chat.completions.create(**fields)  # type: ignore[call-overload]
            texts: dict[int, str] = dict.fromkeys(range(3), "")
            tokens: dict[int, list[int]] = {index: [] for index in range(3)}
            logprobs: dict[int, list[float]] = {index: [] for index in range(3)}
            async for chunk in await client.chat.completions.create(**fields, stream=True):  # type: ignore[call-overload]
                choice = chunk.choices[0]
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += choice.model_extra["token_ids"]
                logprobs[choice.index] += [entry.logprob for entry in choice.logprobs.content]
            for choice in whole.choices:
                assert texts[choice.index] == choice.message.content
                assert tokens[choice.index] == choice.model_extra["token_ids"]
                assert len(choice.logprobs.content) == len(tokens[choice.index])
                logprobs_of_choice = [entry.logprob for entry in choice.logprobs.content]
                assert logprobs_of_choice == pytest.approx(logprobs[choice.index], abs=1e-4)
                assert all(value <= 0 for value in logprobs_of_choice)


def break_logits(stack: Stack) -> None:
    """Make the logits after token 200 NaN."""
    embedding = stack.source.model.model.embed_tokens
    embedding.weight = mx.where(mx.arange(len(embedding.weight))[:, None] == 200, float("nan"), embedding.weight)


def break_prefill(stack: Stack) -> None:
    """Let the model raise for prompts that contain token 200."""
    embed = stack.source.model.model.embed_tokens

    def refuse(tokens: mx.array) -> mx.array:
        if (np.array(tokens) == 200).any():
            raise RuntimeError("refused by the test")
        return cast(mx.array, embed(tokens))

    stack.source.model.model.embed_tokens = refuse


def break_detokenization(stack: Stack) -> None:
    """Let the tokenizer raise for completions of token 201; in a stream, after the first tokens."""
    tokenizer = stack.source.tokenizer
    decode, calls = tokenizer.decode, list[Sequence[int]]()

    def refuse(tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if 201 in tokens:
            calls.append(tokens)
        if 201 in tokens and (len(tokens) >= 40 or len(calls) > 3):
            raise ValueError("refused by the test")
        return decode(tokens, skip_special_tokens=skip_special_tokens)

    tokenizer.decode = refuse  # type: ignore[method-assign]


@pytest.mark.usefixtures("device_path")  # on the host path, prompts do not pass through the modules that fail
@pytest.mark.parametrize(
    ("fault", "stream_status"), [(break_logits, 500), (break_prefill, 500), (break_detokenization, 200)]
)
async def test_a_request_that_fails_in_the_engine_fails_alone(
    fault: Callable[[Stack], None], stream_status: int
) -> None:
    """Status 500, or the error event of a stream that has begun. A request beside it and later requests succeed."""
    never = {"200": -100, "201": -100}
    good = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "logit_bias": never}
    bad = {"prompt": [200] * 20, "max_tokens": 40, "temperature": 0, "logit_bias": {"200": -100, "201": 100}}
    answers: dict[str, httpx.Response] = {}
    async with serving() as (stack, client), httpx.AsyncClient(base_url=str(client.base_url), timeout=30) as http:
        await anyio.to_thread.run_sync(stack.compute.decode.submit(lambda: fault(stack)).result)

        async def post(name: str, fields: dict[str, object]) -> None:
            answers[name] = await http.post("completions", json=fields)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, "beside", good)
            tasks.start_soon(post, "whole", bad)
            tasks.start_soon(post, "stream", bad | {"stream": True})
        await post("after", good)
        assert await stack.rows() == 0
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "beside": 200, "whole": 500, "stream": stream_status, "after": 200,
    }  # fmt: skip
    assert answers["whole"].json()["error"]["code"] == "generation_failed"
    if stream_status == 500:
        assert answers["stream"].json()["error"]["code"] == "generation_failed"
        return
    *_, error, done = answers["stream"].text.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert done == "data: [DONE]"


async def test_a_disconnect_aborts_the_completions_of_a_model() -> None:
    """During a stream and before a response."""
    async with serving() as (stack, client):
        endless = {"model": "policy", "prompt": "x", "max_tokens": 500, "n": 4, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(**endless, stream=True)  # type: ignore[call-overload]
        async for _ in stream:
            break
        assert await stack.rows() == 4
        await stream.close()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.completions.create(**endless))  # type: ignore[call-overload]
            await wait_for_rows(stack)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(10):
            while await stack.rows():
                pass
        answer = await client.completions.create(model="policy", prompt="x", max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.completion_tokens >= 1


async def wait_for_rows(stack: Stack) -> None:
    """Wait until the engine has completions."""
    with anyio.fail_after(10):
        while not await stack.rows():
            pass


@pytest.mark.parametrize(
    ("bias", "fields", "plain", "full"),
    [
        ("256", {"ignore_eos": True, "max_tokens": 2}, "", "<|end|><|end|>"),
        ("65", {"stop": "AAA"}, "", "AAA"),
        ("65", {"stop_token_ids": [65]}, "", "A"),
    ],
    ids=["special token", "stop string", "stop token"],
)
async def test_a_text_can_include_special_tokens_and_what_stopped_it(
    bias: str, fields: dict[str, object], plain: str, full: str
) -> None:
    """`skip_special_tokens` and `include_stop_str_in_output` of vLLM; a stream has the same text."""
    body = {"model": "policy", "prompt": "x", "temperature": 0, "logit_bias": {bias: 100}, **fields}
    options = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    async with serving() as (_, client), httpx.AsyncClient(base_url=str(client.base_url), timeout=30) as http:
        for extra, text in (({}, plain), (options, full)):
            answer = (await http.post("completions", json=body | extra)).json()
            assert answer["choices"][0]["text"] == text
            streamed = await http.post("completions", json=body | extra | {"stream": True})
            chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


async def test_a_conversation_sets_variables_of_the_template_and_continues_its_last_message() -> None:
    """The prompt is that of the rendered template; /tokenize shows it."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I think "}]
    async with serving() as (_, client), httpx.AsyncClient(base_url=str(client.base_url), timeout=30) as http:

        async def prompt(**fields: object) -> str:
            answer = await http.post("chat/completions", json={"messages": talk, "max_tokens": 1, **fields})
            assert answer.status_code == 200, answer.text
            (root,) = [str(client.base_url).removesuffix("/v1/")]
            tokens = (await http.post(f"{root}/tokenize", json={"messages": talk, **fields})).json()["tokens"]
            assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
            return bytes(tokens).decode()

        assert await prompt() == "user: hi\nassistant: I think \nassistant: "
        continued = await prompt(continue_final_message=True, add_generation_prompt=False)
        assert continued == "user: hi\nassistant: I think "
        shown = await prompt(chat_template_kwargs={"mood": "calm"}, add_generation_prompt=False)
        assert shown == "mood: calm\nuser: hi\nassistant: I think \n"
        for fields, param in (
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
            ({"continue_final_message": True, "messages": talk[:1]}, "continue_final_message"),
            ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ):
            refused = await http.post("chat/completions", json={"messages": talk, "max_tokens": 1} | fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
