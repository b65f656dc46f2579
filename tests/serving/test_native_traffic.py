"""Native requests in flight: a cap, and nothing left of clients that leave."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from msgspec import structs

from clotho.serving import limits as traffic
from protocols.sampling import PromptLogprobs
from tests.serving.serving import services, serving

ENDLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/generate", {"prompt": {"prompt_token_ids": [1, 2]}, "n": 4, "max_tokens": 400, "ignore_eos": True}),
    "sglang": ("/generate", {"input_ids": [1, 2], "sampling_params": {"n": 4, "ignore_eos": True}}),
    "trl": ("/v1/generate/", {"prompts": ["a", "b"], "n": 2, "max_tokens": 400, "ignore_eos": True}),
}


@pytest.mark.parametrize("shape", ENDLESS)
async def test_a_client_that_leaves_frees_the_rows(shape: str) -> None:
    """The whole group is aborted in the engine."""
    route, body = ENDLESS[shape]
    async with serving() as served:
        served.engine.allow(3)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: served.http.post(route, json=body))
            await served.engine.until(lambda: served.engine.running == 4)
            tasks.cancel_scope.cancel()
        await served.engine.until(lambda: served.engine.running == 0)
        assert len(served.engine.aborted) == (2 if shape == "trl" else 1)


async def test_beyond_the_line_requests_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 with Retry-After while as many as allowed are in flight and in line, whatever their shape."""
    monkeypatch.setattr(traffic, "LONGEST_LINE", 0)
    async with serving(max_concurrent=1) as served:
        served.engine.allow(0)
        route, body = ENDLESS["vllm"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: served.http.post(route, json=body))
            await served.engine.until(lambda: served.engine.running == 4)
            for other, fields in ENDLESS.values():
                busy = await served.post(other, **fields)
                assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
            assert (await served.http.get("/health")).status_code == 200
            served.engine.allow(10**6)


async def test_prompts_are_scored_one_at_a_time_and_given_up_with_their_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each holds a cache of its own while it is scored: the second waits, and goes on when the first has left."""
    entered, left = [anyio.Event(), anyio.Event()], anyio.Event()
    begun: list[tuple[int, ...]] = []

    async def score(tokens: tuple[int, ...], top: int) -> PromptLogprobs:
        begun.append(tokens)
        entered[len(begun) - 1].set()
        if len(begun) == 1:
            try:
                await anyio.sleep_forever()
            finally:
                left.set()
        return PromptLogprobs(version=3, logprobs=(-1.0,), top_logprobs=((),))

    monkeypatch.setattr("tests.serving.serving.services", lambda *args, **keys: scoring(score, *args, **keys))
    async with serving() as served, anyio.create_task_group() as tasks:
        first = anyio.CancelScope()
        answers = []

        async def ask_first() -> None:
            with first:
                await served.post("/generate", prompt={"prompt_token_ids": [1, 2]}, prompt_logprobs=0)

        async def ask_second() -> None:
            answers.append(await served.post("/generate", prompt={"prompt_token_ids": [3, 4]}, prompt_logprobs=0))

        with anyio.fail_after(10):
            tasks.start_soon(ask_first)
            await entered[0].wait()
            tasks.start_soon(ask_second)
            assert (await served.post("/generate", prompt="not scored")).status_code == 200
            assert begun == [(1, 2)]
            first.cancel()
            await left.wait()
            await entered[1].wait()
    assert begun == [(1, 2), (3, 4)]
    assert answers[0].json()["prompt_logprobs"] == [None, {"4": -1.0}]


def scoring(score: Any, *args: Any, **keys: Any) -> Any:
    """The services of `serving`, with another way to score prompts."""
    return structs.replace(services(*args, **keys), prompt_logprobs=score)
