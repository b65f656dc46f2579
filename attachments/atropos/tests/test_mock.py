"""The mock: groups in the format of the API server, sampled over the HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from attachments.atropos.mock import MockAtropos
from attachments.atropos.tests.environment_groups import ReaderHarness
from attachments.atropos.tests.fake_api import FIELDS
from clotho.settings.engine import SamplingSection
from protocols.prompt import Prompt
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from tests.actors.actor_helpers import prompt
from tests.serving.running_server import Served, serving

SAMPLING = SamplingSection(group_size=3, max_tokens=6, ignore_eos=True, temperature=0.5)


class IndexReward:
    """The reward of a completion is its index in the group. scored: all groups."""

    def __init__(self) -> None:
        self.scored: list[RolloutGroup] = []

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Score a group; fail for a prompt that starts with 13."""
        self.scored.append(group)
        if group.prompt.tokens[0] == 13:
            return Discarded(prompt=group.prompt, reason="reward_error", detail="no luck")
        return ScoredGroup(group=group, rewards=tuple(float(i) for i in range(len(group.completions))), parts={})


def make(number: int) -> Prompt:
    """Return the prompt of a number."""
    return prompt(number, (number, 7, 9))


@asynccontextmanager
async def running_mock(
    *, first: int = 0, max_choices: int = 64, **server: Any
) -> AsyncIterator[tuple[MockAtropos, IndexReward, Served]]:
    """Run the mock with an HTTP server and a fake engine."""
    rewards = IndexReward()
    async with serving(**server) as served:
        mock = MockAtropos(
            served.url,
            api_key=server.get("api_key", ""),
            make_prompt=make,
            first_prompt=first,
            rewards=rewards,
            sampling=SAMPLING,
            batch_size=2,
            max_choices=max_choices,
        )
        yield mock, rewards, served
        await mock.close()


async def test_a_batch_has_the_format_of_the_api_server() -> None:
    """Masks are labels; tokens that were not sampled have log-probability 1.0."""
    async with running_mock(first=20) as (mock, rewards, served):
        await mock.open(step=0)
        batch = await mock.batch(step=0)
        assert batch
        for raw, begins in zip(batch, (20, 21), strict=True):
            group = msgspec.json.decode(raw)
            assert set(group) == set(FIELDS)
            assert group["scores"] == [0.0, 1.0, 2.0]
            scored = next(one for one in rewards.scored if one.prompt.tokens[0] == begins)
            for i, completion in enumerate(scored.completions):
                assert group["tokens"][i] == [begins, 7, 9, *completion.tokens]
                assert group["masks"][i] == [-100] * 3 + list(completion.tokens)
                assert group["inference_logprobs"][i] == [1.0] * 3 + list(completion.logprobs)
                assert len(completion.text) == 6
        requests = served.engine.requests
        assert [len(request.seeds) for request in requests] == [3, 3]
        assert {request.sampling.temperature for request in requests} == {0.5}
        assert requests[0].sampling.ignore_eos


async def test_the_reader_accepts_a_group_of_the_mock() -> None:
    """The group is scored as one of an environment."""
    async with running_mock() as (mock, _, __):
        scored = await ReaderHarness().scored((await mock.batch(step=0) or [])[0])
        assert (scored.group.prompt.tokens, scored.rewards) == ((0, 7, 9), (0.0, 1.0, 2.0))


async def test_every_batch_samples_the_next_prompts() -> None:
    """Nothing is sampled before the first batch."""
    async with running_mock() as (mock, rewards, served):
        assert served.engine.requests == []
        await mock.batch(step=0)
        await mock.batch(step=1)
        assert sorted(group.prompt.tokens[0] for group in rewards.scored) == [0, 1, 2, 3]


async def test_a_group_above_max_choices_is_sampled_in_several_requests() -> None:
    """Each request has its own seeds."""
    async with running_mock(max_choices=2) as (mock, _, served):
        batch = await mock.batch(step=0) or []
        assert [len(msgspec.json.decode(raw)["tokens"]) for raw in batch] == [3, 3]
        assert sorted(len(request.seeds) for request in served.engine.requests) == [1, 1, 2, 2]
        assert len({seed for request in served.engine.requests for seed in request.seeds}) == 6


async def test_requests_contain_the_api_key_and_a_label() -> None:
    """The label is `mock`."""
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(503)

    mock = MockAtropos(
        "http://policy.example",
        api_key="secret",
        make_prompt=make,
        first_prompt=0,
        rewards=IndexReward(),
        sampling=SAMPLING,
        batch_size=2,
        max_choices=64,
        transport=httpx.MockTransport(answer),
    )
    with capture_logs() as logs:
        assert await mock.batch(step=0) is None
    assert seen == ["Bearer secret:mock"] * 2
    assert len(logs) == 2
    await mock.close()


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(503, text="overloaded"),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"text": ["a"], "token_ids": [[1]], "logprobs": None, "finish_reasons": ["stop"]}),
    ],
)
async def test_a_failed_group_is_logged_and_skipped(answer: httpx.Response) -> None:
    """The other groups of the batch are returned; the next batch is complete."""
    async with running_mock() as (mock, _, __):
        network = mock._http._transport
        answers = [answer]

        class Stumbling(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                return answers.pop() if answers else await network.handle_async_request(request)

        mock._http._transport = Stumbling()
        with capture_logs() as logs:
            assert len(await mock.batch(step=0) or []) == 1
        assert [entry["log_level"] for entry in logs] == ["warning"]
        assert len(await mock.batch(step=0) or []) == 2
        mock._http._transport = network


async def test_a_group_that_cannot_be_scored_is_skipped() -> None:
    """The other groups of the batch are returned."""
    async with running_mock(first=13) as (mock, _, __):
        with capture_logs() as logs:
            assert len(await mock.batch(step=0) or []) == 1
        assert logs[0]["error"] == "no luck"
