"""POST /v1/generate in the format of TRL's server."""

from __future__ import annotations

import pytest

from tests.fakes import END, CharacterTokenizer
from tests.serving.running_server import serving

PARAMETERS = {
    "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 1024,
}  # fmt: skip


@pytest.mark.parametrize("route", ["/v1/generate/", "/v1/generate"])
async def test_rows_are_ordered_by_prompt(route: str) -> None:
    """Row i * n + j is completion j of prompt i, including the end token. max_tokens is limited to the context."""
    async with serving() as served:
        answer = await served.post(route, prompts=["one", [4, END, END]], n=3, **PARAMETERS)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-clotho-weights-version"] == "3"
        body = answer.json()
        assert [request.prompt for request in served.engine.requests] == [
            CharacterTokenizer().encode("one"), (4, END, END),
        ]  # fmt: skip
        assert body["prompt_ids"] == [list(request.prompt) for request in served.engine.requests]
        assert [len(row) for row in body["logprobs"]] == [len(row) for row in body["completion_ids"]]
        assert len(body["completion_ids"]) == 6
        for row, reason in zip(body["completion_ids"], body["finish_reasons"], strict=True):
            assert (reason == "stop") == (row[-1] == END)
        assert (body["weights_version"], body["system_fingerprint"]) == (3, "f3")
        assert len(body["weights_versions"]) == 6


async def test_native_requests_count_in_the_metrics() -> None:
    """In the counters of prompt tokens and of generated tokens."""
    async with serving() as served:
        fields = {"n": 2, "max_tokens": 3, "ignore_eos": True}
        await served.post("/v1/generate/", prompts=["abc"], **fields)
        await served.post("/generate", prompt="de", **fields)
        text = (await served.http.get("/metrics")).text
        assert 'vllm:prompt_tokens_total{model_name="policy"} 5.0' in text
        assert 'vllm:generation_tokens_total{model_name="policy"} 12.0' in text
