"""Malformed requests to the native routes: one line of 4xx each, and the next good request is answered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from protocols.errors import RequestError
from tests.fakes import CharacterTokenizer
from tests.serving.serving import CONTEXT, Served, serving

VOCABULARY = CharacterTokenizer.vocab_size
IDS = {"prompt_token_ids": [1, 2]}

# What is laid over a good body of each shape, the field that is named, and a part of the message.
VLLM: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "int"),
    ({"prompt": [1, 2]}, "prompt", "array"),
    ({"prompt": {"prompt_token_ids": []}}, "prompt", "empty"),
    ({"prompt": {"prompt_token_ids": [-1]}}, "prompt", ">= 0"),
    ({"prompt": {"prompt_token_ids": [VOCABULARY]}}, "prompt", "vocabulary"),
    ({"prompt": {"prompt_token_ids": [2**70]}}, "prompt", "vocabulary"),
    ({"prompt": {"prompt_token_ids": [True]}}, "prompt", "bool"),
    ({"prompt": {"prompt_token_ids": [1.5]}}, "prompt", "float"),
    ({"prompt": {"prompt_token_ids": "12"}}, "prompt", "str"),
    ({"prompt": {}}, "prompt", "prompt_token_ids"),
    ({"prompt": {**IDS, "multi_modal_data": {"image": "x"}}}, "prompt", "multi_modal_data"),
    ({"prompt": {"prompt_token_ids": [1] * CONTEXT}}, "prompt", "no room"),
    ({"input_ids": [1]}, "prompt", "input_ids"),
    ({"logprobs": 21}, "logprobs", "<= 20"),
    ({"logprobs": True}, "logprobs", "bool"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "<= 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", ">= 0"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": 65}, "n", "limit of 64"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"temperature": -1}, "temperature", ">= 0.0"),
    ({"temperature": "hot"}, "temperature", "str"),
    ({"top_k": -2}, "top_k", ">= 0"),
    ({"top_p": 0}, "top_p", "> 0.0"),
    ({"seed": -1}, "seed", ">= 0"),
    ({"stop": ["x"] * 17}, "stop", "<= 16"),
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids", "vocabulary"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "int"),
    ({"stream": True}, "stream", "not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"min_tokens": 2}, "min_tokens", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"guided_regex": "a*"}, "guided_regex", "not supported"),
]
SGLANG: list[tuple[dict[str, Any], str, str]] = [
    ({"input_ids": None}, "prompt", "missing"),
    ({"input_ids": None, "sampling_params": {"n": 1}}, "input_ids", "either"),
    ({"text": "x"}, "input_ids", "either"),
    ({"input_ids": []}, "input_ids", "empty"),
    ({"input_ids": [[1], [2]]}, "input_ids", "array"),
    ({"input_ids": [VOCABULARY]}, "input_ids", "vocabulary"),
    ({"input_ids": None, "text": ""}, "text", "empty"),
    ({"input_ids": None, "text": ["x"]}, "text", "array"),
    ({"sampling_params": [{}]}, "sampling_params", "array"),
    ({"sampling_params": {"n": 65}}, "n", "limit of 64"),
    ({"sampling_params": {"temperature": -1}}, "temperature", ">= 0.0"),
    ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens", ">= 1"),
    ({"sampling_params": {"min_new_tokens": 2}}, "min_new_tokens", "not supported"),
    ({"sampling_params": {"json_schema": "{}"}}, "json_schema", "not supported"),
    ({"return_logprob": 1}, "return_logprob", "int"),
    ({"top_logprobs_num": 21}, "top_logprobs_num", "<= 20"),
    ({"stream": True}, "stream", "not supported"),
    ({"image_data": ["http://169.254.169.254"]}, "image_data", "not supported"),
    ({"lora_path": "/etc"}, "lora_path", "not supported"),
]
TRL: list[tuple[dict[str, Any], str, str]] = [
    ({"prompts": None}, "prompts", "array"),
    ({"prompts": []}, "prompts", ">= 1"),
    ({"prompts": "x"}, "prompts", "str"),
    ({"prompts": [""]}, "prompts", "empty"),
    ({"prompts": ["x"] * 65}, "prompts", "limit of 64"),
    ({"prompts": ["x"] * 5, "n": 13}, "prompts", "limit of 64"),
    ({"prompts": [5]}, "prompts", "int"),
    ({"max_tokens": -1}, "max_tokens", ">= 1"),
    ({"images": ["x"]}, "images", "not supported"),
    ({"generation_kwargs": {"a": 1}}, "generation_kwargs", "not supported"),
]
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/generate", {"prompt": IDS, "logprobs": 0}),
    "sglang": ("/generate", {"input_ids": [1, 2], "return_logprob": True}),
    "trl": ("/v1/generate/", {"prompts": ["x"]}),
}
BAD_BODIES = [b"", b"{", b"\xff", b"[1]", b"null", b'{"n": 1, "n": 2}', b'{"n": NaN}', b"[" * 100_000, b"{}"]


def refused(answer: httpx.Response, param: str | None, text: str) -> None:
    """Check the status and the whole shape of the error."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert text in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert param is None or error["param"] == param


async def still_alive(served: Served, shape: str) -> None:
    """The next good request is answered, and nothing of the bad ones has reached the engine."""
    route, body = GOOD[shape]
    assert served.engine.asked == []
    assert served.scored == []
    assert (await served.post(route, **body)).status_code == 200


@pytest.mark.parametrize(("shape", "table"), [("vllm", VLLM), ("sglang", SGLANG), ("trl", TRL)])
async def test_bad_fields_are_refused_by_name(shape: str, table: list[tuple[dict[str, Any], str, str]]) -> None:
    """Wrong type, out of range, not supported: 400 that names the field and what is allowed."""
    route, good = GOOD[shape]
    async with serving() as served:
        for fields, param, text in table:
            refused(await served.post(route, **(good | fields)), param, text)
        await still_alive(served, shape)


@pytest.mark.parametrize("shape", GOOD)
async def test_bodies_that_are_not_strict_json_are_refused(shape: str) -> None:
    """Truncated, not UTF-8, not finite, too deep, not an object, named twice, empty."""
    async with serving() as served:
        for body in BAD_BODIES:
            refused(await served.http.post(GOOD[shape][0], content=body), None, "")
        await still_alive(served, shape)


@pytest.mark.parametrize("shape", GOOD)
async def test_other_models_are_not_found(shape: str) -> None:
    """404, wherever the model is named."""
    route, good = GOOD[shape]
    async with serving() as served:
        bodies = [
            good | {"model": "other"},
            *([good | {"sampling_params": {"model": "x"}}] if shape == "sglang" else []),
        ]
        for body in bodies:
            answer = await served.post(route, **body)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
        assert (await served.post(route, **good, model="policy")).status_code == 200


@pytest.mark.parametrize("shape", GOOD)
async def test_the_guards_stand_before_the_native_routes_too(shape: str) -> None:
    """API key, size of the body, requests at once, what the engine refuses, pages of other sites, methods."""
    route, good = GOOD[shape]
    async with serving(api_key="secret", max_body_bytes=1000) as served:
        key = {"authorization": "Bearer secret"}
        assert (await served.post(route, **good)).status_code == 401
        assert (await served.http.post(route, content=b"x" * 1001, headers=key)).status_code == 413
        assert (
            await served.http.post(route, json=good, headers=key | {"origin": "http://evil.com"})
        ).status_code == 400
        assert (await served.http.get(route, headers=key)).status_code == 405
        served.engine.refusal = RequestError("4000 completions wait already", param="queue")
        busy = await served.http.post(route, json=good, headers=key)
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        served.engine.refusal = RequestError("the cache is too small for this", param="max_tokens")
        refused(await served.http.post(route, json=good, headers=key), "max_tokens", "cache is too small")
        served.engine.refusal = None
        assert (await served.http.post(route, json=good, headers=key)).status_code == 200


async def test_a_prompt_that_the_engine_refuses_is_not_scored() -> None:
    """A prompt beyond the cache costs nothing, although its log-probabilities were asked for."""
    async with serving() as served:
        served.engine.refusal = RequestError("the cache is too small for this", param="max_tokens")
        refused(await served.post("/generate", prompt=IDS, prompt_logprobs=2), "max_tokens", "cache is too small")
        assert served.scored == []


async def test_there_is_no_generate_of_vllm_under_v1() -> None:
    """The two shapes of /generate live at the root, TRL's under /v1."""
    async with serving() as served:
        refused(await served.post("/v1/generate", **GOOD["vllm"][1]), "prompts", "prompts")
        refused(await served.post("/generate", **GOOD["trl"][1]), "prompt", "missing")
