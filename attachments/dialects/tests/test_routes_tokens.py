"""POST /inference/v1/generate, vLLM's route for tokens."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

import anyio
import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest

from clotho.models.experts import Mixtures
from tests.fakes import CharacterTokenizer
from tests.serving.embedded_server import serving as serving_embedded
from tests.serving.running_server import CONTEXT, Served, serving
from tests.serving.test_with_engine import serving as serving_engine

ROUTE = "/inference/v1/generate"
IDS = [5, 9, 33]


async def generate(served: Served, **params: Any) -> Any:
    """Return the response to a request with these sampling parameters."""
    answer = await served.post(ROUTE, model="policy", token_ids=IDS, sampling_params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_client_of_the_token_route_gets_tokens_with_log_probabilities() -> None:
    """A client reads the limit of /v1/models, sends tokens, and checks one log-probability per sampled token."""
    async with serving() as served:
        (card,) = (await served.http.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == CONTEXT
        params = {
            "stop_token_ids": [96], "logprobs": 1, "skip_special_tokens": False, "max_tokens": 12, "temperature": 1.0,
        }  # fmt: skip
        body = {"model": card["id"], "token_ids": IDS, "sampling_params": params, "cache_salt": "v3", "priority": 0}
        answer = (await served.post(ROUTE, **body)).json()
        (choice,) = answer["choices"]
        assert served.engine.requests[0].prompt == tuple(IDS)
        assert choice["finish_reason"] in ("stop", "length")
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert all(-9999.0 < entry["logprob"] <= 0 for entry in content)
        assert [len(entry["top_logprobs"]) for entry in content] == [1] * len(content)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(IDS)
        assert usage["completion_tokens"] == len(choice["token_ids"])
        assert answer["weights_versions"] == [{"first": 3, "last": 3}]
        assert "cache_salt" in answer["ignored_fields"]


async def test_the_client_of_openai_reaches_the_route_outside_of_v1() -> None:
    """As renderers' client does: an absolute address, and the model and its limit from `/v1/models`."""
    async with serving() as served:
        cards: Any = await served.openai.get("/models", cast_to=dict[str, Any])
        (limit,) = [card["max_model_len"] for card in cards["data"] if card["id"] == "policy"]
        root = str(served.openai.base_url).rstrip("/").removesuffix("/v1")
        params = {"stop_token_ids": [96], "logprobs": 1, "skip_special_tokens": False, "max_tokens": 4}
        body = {"model": "policy", "token_ids": IDS * (limit // len(IDS) - 2), "sampling_params": params}
        answer = await served.openai.post(f"{root}{ROUTE}", cast_to=httpx.Response, body=body)
        (choice,) = answer.json()["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) <= 4
        with pytest.raises(openai.BadRequestError) as refused:
            await served.openai.post(
                f"{root}{ROUTE}", cast_to=httpx.Response, body={**body, "token_ids": IDS * (limit // len(IDS) + 1)}
            )
        assert refused.value.param == "token_ids"


async def test_a_request_has_the_id_that_its_client_gave() -> None:
    """Otherwise a random one."""
    async with serving() as served:
        given = (await served.post(ROUTE, token_ids=IDS, request_id="mine")).json()
        assert given["request_id"] == "mine"
        assert served.engine.requests[0].request_id == "mine"
        assert len((await generate(served))["request_id"]) == 32


async def test_prompt_logprobs_have_one_entry_per_token() -> None:
    """The first token has no context."""
    async with serving() as served:
        found = (await generate(served, prompt_logprobs=2, max_tokens=1))["prompt_logprobs"]
        assert found[0] is None
        assert [position[str(token)]["logprob"] for token, position in zip(IDS[1:], found[1:], strict=True)] == [
            -token / 8 for token in IDS[1:]
        ]
        assert [len(position) for position in found[1:]] == [2, 2]
        text = CharacterTokenizer().token_text(IDS[1])
        assert found[1][str(IDS[1])] == {"logprob": -IDS[1] / 8, "rank": 1, "decoded_token": text}
        assert (await generate(served))["prompt_logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [97]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": IDS, "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": IDS, "sampling_params": {"logprobs": 21}}, "logprobs"),
        ({"token_ids": IDS, "sampling_params": {"n": 100}}, "n"),
        ({"token_ids": IDS, "sampling_params": {"top_p": 0.5}, "return_sampling_mask": True}, "return_sampling_mask"),
        ({"token_ids": IDS, "stream": True}, "stream"),
        ({"token_ids": IDS, "request_id": ""}, "request_id"),
    ],
)
async def test_an_invalid_request_is_refused(fields: dict[str, Any], param: str) -> None:
    """The error names the field."""
    async with serving() as served:
        answer = await served.post(ROUTE, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


async def test_the_sampling_mask_contains_the_tokens_that_could_be_sampled(tmp_path: Path) -> None:
    """The sampled token is one of the `top_k`; without filters, the mask is null."""
    async with serving_embedded(tmp_path) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=30) as client:
        body = {"token_ids": IDS, "return_sampling_mask": True}
        params = {"top_k": 4, "max_tokens": 6, "logprobs": 4, "ignore_eos": True}
        (choice,) = (await client.post(ROUTE, json=body | {"sampling_params": params})).json()["choices"]
        assert len(choice["sampling_mask"]) == 6
        for token, mask, entry in zip(
            choice["token_ids"], choice["sampling_mask"], choice["logprobs"]["content"], strict=True
        ):
            assert token in mask
            assert len(mask) == 4
            assert {one["token"] for one in entry["top_logprobs"]} == {f"token_id:{kept}" for kept in mask}
        (free,) = (await client.post(ROUTE, json=body)).json()["choices"]
        assert free["sampling_mask"] is None
        (plain,) = (await client.post(ROUTE, json={"token_ids": IDS})).json()["choices"]
        assert "sampling_mask" not in plain


@pytest.mark.parametrize(("architecture", "start"), [("qwen3_moe", 0), ("qwen3_moe", 2), ("qwen3", 0)])
async def test_routed_experts_are_those_of_the_computed_tokens(architecture: str, start: int) -> None:
    """As clients of vLLM's routing replay read them: base64 of (tokens, layers, experts), null without experts."""
    async with serving_engine(architecture=architecture) as (stack, client):
        root = str(client.base_url).rstrip("/").removesuffix("/v1")
        params = {"max_tokens": 5, "ignore_eos": True, "routed_experts_prompt_start": start}
        body: dict[str, Any] = {"token_ids": IDS, "sampling_params": params, "return_routed_experts": True}
        answer = await client.post(f"{root}{ROUTE}", cast_to=httpx.Response, body=body)
        (choice,) = answer.json()["choices"]
        plain = await client.post(f"{root}{ROUTE}", cast_to=httpx.Response, body={"token_ids": IDS})
        assert "routed_experts" not in plain.json()["choices"][0]
        found = choice["routed_experts"]
        if architecture == "qwen3":
            assert found is None
            return
        assert answer.content.index(b'"routed_experts":{"data":"')
        assert (found["shape"], found["dtype"], found["start"]) == ([7 - start, 2, 2], "uint8", start)
        expected_T_C = await anyio.to_thread.run_sync(
            stack.compute.decode.submit(lambda: routes_of(stack.source.model, [*IDS, *choice["token_ids"]])).result
        )
        experts = np.frombuffer(b64decode(found["data"]), dtype=np.uint8).reshape(found["shape"])
        assert np.array_equal(np.sort(experts, -1), np.sort(expected_T_C.reshape(7, 2, 2)[start:], -1))


def routes_of(model: Any, tokens: list[int]) -> Any:
    """Return the routes of all tokens but the last, (T, C)."""
    mixtures = Mixtures(model)
    with mixtures.recorded() as chosen:
        model(mx.array([tokens[:-1]]))
    return np.array(mixtures.routes(chosen))[0]
