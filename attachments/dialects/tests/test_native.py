"""The native endpoints: invalid requests, access control, limits and disconnects."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest
from msgspec import structs

from protocols.errors import RequestError
from protocols.sampling import PromptLogprobs
from tests.fakes import CharacterTokenizer
from tests.serving.running_server import CONTEXT, Served, server_context, serving

VOCABULARY = CharacterTokenizer.vocab_size
IDS = {"prompt_token_ids": [1, 2]}

# Fields that replace those of a valid body, and the expected `param` of the error.
VLLM: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": 5}, "prompt"), ({"prompt": [1, 2]}, "prompt"),
    ({"prompt": {"prompt_token_ids": []}}, "prompt"), ({"prompt": {"prompt_token_ids": [-1]}}, "prompt"),
    ({"prompt": {"prompt_token_ids": [VOCABULARY]}}, "prompt"), ({"prompt": {"prompt_token_ids": [2**70]}}, "prompt"),
    ({"prompt": {"prompt_token_ids": [True]}}, "prompt"), ({"prompt": {"prompt_token_ids": [1.5]}}, "prompt"),
    ({"prompt": {"prompt_token_ids": "12"}}, "prompt"), ({"prompt": {}}, "prompt"),
    ({"prompt": {**IDS, "multi_modal_data": {"image": "x"}}}, "prompt"),
    ({"prompt": {"prompt_token_ids": [1] * CONTEXT}}, "prompt"), ({"input_ids": [1]}, "prompt"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"), ({"n": 0}, "n"), ({"n": 65}, "n"), ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_k": -2}, "top_k"),
    ({"top_p": 0}, "top_p"), ({"seed": -2}, "seed"), ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"), ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"stream": True}, "stream"), ({"presence_penalty": 2.5}, "presence_penalty"), ({"min_tokens": -2}, "min_tokens"),
    ({"use_beam_search": True}, "use_beam_search"), ({"guided_regex": "a*", "guided_choice": ["b"]}, "guided_regex"),
]  # fmt: skip
SGLANG: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": None}, "prompt"), ({"input_ids": None, "sampling_params": {"n": 1}}, "input_ids"),
    ({"text": "x"}, "input_ids"), ({"input_ids": []}, "input_ids"), ({"input_ids": [[1], [2]]}, "input_ids"),
    ({"input_ids": [VOCABULARY]}, "input_ids"), ({"input_ids": None, "text": ""}, "text"),
    ({"input_ids": None, "text": ["x"]}, "text"), ({"sampling_params": [{}]}, "sampling_params"),
    ({"sampling_params": {"n": 65}}, "n"), ({"sampling_params": {"temperature": -1}}, "temperature"),
    ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"sampling_params": {"min_new_tokens": -2}}, "min_new_tokens"),
    ({"sampling_params": {"json_schema": "{}", "regex": "a"}}, "regex"), ({"return_logprob": 1}, "return_logprob"),
    ({"top_logprobs_num": 21}, "top_logprobs_num"), ({"stream": True}, "stream"),
    ({"image_data": ["http://169.254.169.254"]}, "image_data"), ({"lora_path": "/etc"}, "lora_path"),
]  # fmt: skip
TRL: list[tuple[dict[str, Any], str]] = [
    ({"prompts": None}, "prompts"), ({"prompts": []}, "prompts"), ({"prompts": "x"}, "prompts"),
    ({"prompts": [""]}, "prompts"), ({"prompts": ["x"] * 65}, "prompts"), ({"prompts": ["x"] * 5, "n": 13}, "prompts"),
    ({"prompts": [5]}, "prompts"), ({"max_tokens": -1}, "max_tokens"), ({"images": ["x"]}, "images"),
    ({"generation_kwargs": {"a": 1}}, "generation_kwargs"),
]  # fmt: skip
VALID: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/generate", {"prompt": IDS, "logprobs": 0}),
    "sglang": ("/generate", {"input_ids": [1, 2], "return_logprob": True}),
    "trl": ("/v1/generate/", {"prompts": ["x"]}),
}
BAD_BODIES = [b"", b"{", b"\xff", b"[1]", b"null", b'{"n": 1, "n": 2}', b'{"n": NaN}', b"[" * 100_000, b"{}"]


def assert_rejected(answer: httpx.Response, param: str | None) -> None:
    """Check the status and every field of the error."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert param is None or error["param"] == param


async def assert_still_serving(served: Served, api: str) -> None:
    """Check that no invalid request reached the engine and that a valid request succeeds."""
    route, body = VALID[api]
    assert served.engine.requests == []
    assert served.scored == []
    assert (await served.post(route, **body)).status_code == 200


@pytest.mark.parametrize(("api", "table"), [("vllm", VLLM), ("sglang", SGLANG), ("trl", TRL)])
async def test_an_invalid_request_is_rejected_with_the_name_of_the_field(
    api: str, table: list[tuple[dict[str, Any], str]]
) -> None:
    """Wrong type, out of range, not supported."""
    route, valid = VALID[api]
    async with serving() as served:
        for fields, param in table:
            assert_rejected(await served.post(route, **(valid | fields)), param)
        await assert_still_serving(served, api)


@pytest.mark.parametrize("api", VALID)
async def test_an_unknown_model_is_a_404(api: str) -> None:
    """Also in SGLang's `sampling_params`."""
    route, valid = VALID[api]
    async with serving() as served:
        bodies = [
            valid | {"model": "other"},
            *([valid | {"sampling_params": {"model": "x"}}] if api == "sglang" else []),
        ]
        for body in bodies:
            answer = await served.post(route, **body)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
        assert (await served.post(route, **valid, model="policy")).status_code == 200


@pytest.mark.parametrize("api", VALID)
async def test_access_control_and_limits_apply_to_the_native_endpoints(api: str) -> None:
    """API key, body size, Origin header, method, full queue of the engine, and requests that the engine rejects."""
    route, valid = VALID[api]
    async with serving(api_key="secret", max_body_bytes=1000) as served:
        key = {"authorization": "Bearer secret"}
        assert (await served.post(route, **valid)).status_code == 401
        assert (await served.http.post(route, content=b"x" * 1001, headers=key)).status_code == 413
        assert (
            await served.http.post(route, json=valid, headers=key | {"origin": "http://evil.com"})
        ).status_code == 400
        assert (await served.http.get(route, headers=key)).status_code == 405
        served.engine.refusal = RequestError("4000 completions wait already", param="queue")
        busy = await served.http.post(route, json=valid, headers=key)
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        served.engine.refusal = RequestError("the cache is too small for this", param="max_tokens")
        assert_rejected(await served.http.post(route, json=valid, headers=key), "max_tokens")
        served.engine.refusal = None
        assert (await served.http.post(route, json=valid, headers=key)).status_code == 200


async def test_the_prompt_of_a_request_that_the_engine_rejects_is_not_scored() -> None:
    """A prompt that does not fit into the KV cache costs no forward pass, even with prompt_logprobs."""
    async with serving() as served:
        served.engine.refusal = RequestError("the cache is too small for this", param="max_tokens")
        assert_rejected(await served.post("/generate", prompt=IDS, prompt_logprobs=2), "max_tokens")
        assert served.scored == []


async def test_each_path_accepts_only_its_own_formats() -> None:
    """/generate accepts the formats of vLLM and SGLang, /v1/generate that of TRL."""
    async with serving() as served:
        assert_rejected(await served.post("/v1/generate", **VALID["vllm"][1]), "prompts")
        assert_rejected(await served.post("/generate", **VALID["trl"][1]), "prompt")


ENDLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/generate", {"prompt": {"prompt_token_ids": [1, 2]}, "n": 4, "max_tokens": 400, "ignore_eos": True}),
    "sglang": ("/generate", {"input_ids": [1, 2], "sampling_params": {"n": 4, "ignore_eos": True}}),
    "trl": ("/v1/generate/", {"prompts": ["a", "b"], "n": 2, "max_tokens": 400, "ignore_eos": True}),
}


@pytest.mark.parametrize("api", ENDLESS)
async def test_a_disconnect_aborts_the_whole_group(api: str) -> None:
    """The engine aborts every request of the client."""
    route, body = ENDLESS[api]
    async with serving() as served:
        served.engine.allow(3)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: served.http.post(route, json=body))
            await served.engine.wait_until(lambda: served.engine.running == 4)
            tasks.cancel_scope.cancel()
        await served.engine.wait_until(lambda: served.engine.running == 0)
        assert len(served.engine.aborted) == (2 if api == "trl" else 1)


async def test_prompts_are_scored_one_at_a_time_and_a_disconnect_cancels_the_scoring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each scored prompt uses a KV cache of its own. The second request waits until the first is cancelled."""
    entered, left = [anyio.Event(), anyio.Event()], anyio.Event()
    started: list[tuple[int, ...]] = []

    async def score(tokens: tuple[int, ...], top: int, source: str) -> PromptLogprobs:
        started.append(tokens)
        entered[len(started) - 1].set()
        if len(started) == 1:
            try:
                await anyio.sleep_forever()
            finally:
                left.set()
        return PromptLogprobs(version=3, logprobs=(-1.0,), top_logprobs=((),))

    monkeypatch.setattr(
        "tests.serving.running_server.server_context", lambda *args, **keys: context_with(score, *args, **keys)
    )
    async with serving() as served, anyio.create_task_group() as tasks:
        first = anyio.CancelScope()
        responses = []

        async def post_first() -> None:
            with first:
                await served.post("/generate", prompt={"prompt_token_ids": [1, 2]}, prompt_logprobs=0)

        async def post_second() -> None:
            responses.append(await served.post("/generate", prompt={"prompt_token_ids": [3, 4]}, prompt_logprobs=0))

        with anyio.fail_after(10):
            tasks.start_soon(post_first)
            await entered[0].wait()
            tasks.start_soon(post_second)
            assert (await served.post("/generate", prompt="not scored")).status_code == 200
            assert started == [(1, 2)]
            first.cancel()
            await left.wait()
            await entered[1].wait()
    assert started == [(1, 2), (3, 4)]
    assert responses[0].json()["prompt_logprobs"] == [None, {"4": -1.0}]


def context_with(score: Any, *args: Any, **keys: Any) -> Any:
    """The server context of the tests with another `prompt_logprobs` function."""
    return structs.replace(server_context(*args, **keys), prompt_logprobs=score)
