"""The native endpoints with the engine of a run: log-probabilities equal those of the learner."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from clotho.lanes.compute_thread import finish
from clotho.lanes.sampling_client import EngineSampler
from clotho.models.parameters import flat, nested
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.serving.server import ApiServer
from clotho.settings.server import HttpServer
from protocols.step import WeightsReady
from tests.scoring.scored import sequence_scores
from tests.training_run.built_context import open_context, tiny_profile
from training_run.run import RunContext
from training_run.run_monitor import RunMonitor

PROMPT = [5, 9, 33, 1, 1, 17]


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[RunContext, httpx.AsyncClient, EngineSampler]]:
    """Serve a tiny policy whose adapter has been updated."""
    profile = tiny_profile(directory, server={"type": "http", "port": 0})
    async with open_context(profile) as parts:

        def move() -> None:
            moved = {name: value + 0.05 for name, value in flat(parts.policy.trainable()).items()}
            parts.policy.publish(nested(moved), version=7, step=7, fingerprint="moved")

        await finish(parts.compute.decode.submit(move))
        parts.weights.put(WeightsReady(version=7, step=7, fingerprint="moved"))
        monitor = RunMonitor(parts, queues=[], children=dict)
        async with anyio.create_task_group() as tasks:
            url = await tasks.start(ApiServer(monitor.server_context(HttpServer(port=0, shutdown_seconds=1.0))).run)
            async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                yield parts, client, parts.sampler.client
            tasks.cancel_scope.cancel()


async def learner_logprobs(parts: RunContext, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """Return teacher-forced log-probabilities as the learner computes them."""

    def score() -> list[float]:
        forcing = TeacherForcing(parts.policy.model, parts.policy.vocab_size)
        scores = sequence_scores(forcing, prompt, tokens, distribution=SamplingDistribution(temperature))
        return [float(value) for value in np.array(scores.logp_N)]

    return await finish(parts.compute.decode.submit(score))


async def post(client: httpx.AsyncClient, route: str, **body: Any) -> Any:
    """Return the response to a valid request."""
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-clotho-weights-version"] == "7"
    return answer.json()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probabilities_equal_those_of_the_learner(tmp_path: Path, temperature: float) -> None:
    """In all three formats, with four completions per request, to 2e-4."""
    keys = {"n": 4, "temperature": temperature}
    async with serving(tmp_path) as (parts, client, _):
        vllm = await post(
            client, "/generate", prompt={"prompt_token_ids": PROMPT}, logprobs=0, max_tokens=12, **keys
        )  # fmt: skip
        sglang = await post(
            client, "/generate", input_ids=PROMPT, return_logprob=True, sampling_params=keys | {"max_new_tokens": 12}
        )
        trl = await post(client, "/v1/generate/", prompts=[PROMPT], max_tokens=12, **keys)
        rows = [
            *([next(iter(position[0].items())) for position in row] for row in vllm["logprobs"]),
            *([(entry[1], entry[0]) for entry in one["meta_info"]["output_token_logprobs"]] for one in sglang),
            *(list(zip(*row, strict=True)) for row in zip(trl["completion_ids"], trl["logprobs"], strict=True)),
        ]
        assert len(rows) == 12
        for row in rows:
            expected = await learner_logprobs(parts, PROMPT, [int(token) for token, _ in row], temperature)
            assert [logprob for _, logprob in row] == pytest.approx(expected, abs=2e-4)


async def test_prompt_log_probabilities_equal_those_of_the_learner(tmp_path: Path) -> None:
    """At temperature 1, independent of the temperature of the completion."""
    async with serving(tmp_path) as (parts, client, _):
        answer = await post(
            client, "/generate", prompt={"prompt_token_ids": PROMPT}, prompt_logprobs=3, temperature=0.0, max_tokens=1
        )
        first, *others = answer["prompt_logprobs"]
        assert first is None
        positions = [next(iter(entry.items())) for entry in others]
        assert [int(token) for token, _ in positions] == PROMPT[1:]
        expected = await learner_logprobs(parts, PROMPT[:1], PROMPT[1:], 1.0)
        assert [logprob for _, logprob in positions] == pytest.approx(expected, abs=2e-4)
        for entry, (token, logprob) in zip(others, positions, strict=True):
            best = [value for other, value in entry.items() if other != token]
            assert len(entry) in (3, 4)
            assert best == sorted(best, reverse=True)
            assert max(best) >= logprob or len(entry) == 3
        assert answer["prompt_weights_version"] == 7


async def test_health_responds_while_the_compute_thread_is_busy(tmp_path: Path) -> None:
    """progress_seconds increases."""
    busy, done = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        assert done.wait(20)

    async with serving(tmp_path) as (parts, client, _):
        held = parts.compute.decode.submit(hold)
        try:
            assert await anyio.to_thread.run_sync(busy.wait, 10)
            with anyio.fail_after(5):
                answers = [await client.get("/health") for _ in range(20)]
            assert not held.done()
        finally:
            done.set()
        assert {answer.status_code for answer in answers} == {200}
        assert 0.0 < answers[0].json()["progress_seconds"] <= answers[-1].json()["progress_seconds"]
        held.result()


async def test_a_run_serves_its_policy_and_its_base_model(tmp_path: Path) -> None:
    """Requests name them; log-probabilities of prompts are those of the named model."""
    async with serving(tmp_path) as (parts, client, _):
        policy, base = (await client.get("/v1/models")).json()["data"]
        assert (policy["id"], policy["parent"], policy["weights_version"]) == ("policy", base["id"], 7)
        assert (base["parent"], base["weights_version"]) == (None, 0)

        def score_base() -> list[float]:
            reference = parts.policy.copy_model()
            reference.use_reference()
            forcing = TeacherForcing(reference.model, reference.vocab_size)
            scores = sequence_scores(forcing, PROMPT[:1], PROMPT[1:], distribution=SamplingDistribution(1.0))
            return [float(value) for value in np.array(scores.logp_N)]

        expected = {
            "policy": await learner_logprobs(parts, PROMPT[:1], PROMPT[1:], 1.0),
            base["id"]: await finish(parts.compute.decode.submit(score_base)),
        }
        for name, logprobs in expected.items():
            body = {"model": name, "prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["model"] == name
            found = answer["choices"][0]["logprobs"]["token_logprobs"]
            assert found[1:] == pytest.approx(logprobs, abs=1e-3)
        assert expected["policy"] != pytest.approx(expected[base["id"]], abs=1e-3)
        sampled = {
            name: (
                await client.post("/v1/completions", json={"model": name, "prompt": PROMPT, "temperature": 0})
            ).json()
            for name in expected
        }
        assert sampled["policy"]["choices"][0]["weights_versions"] == {"first": 7, "last": 7}
        assert sampled[base["id"]]["choices"][0]["weights_versions"] == {"first": 0, "last": 0}
