"""Decoding, updates, evaluations and parity checks at the same time, each with the weights that it names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random

import anyio
import mlx.core as mx
import numpy as np
import pytest

from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute, finish
from clotho.lanes.sampling_client import EngineSampler
from clotho.models.parameters import Parameters
from clotho.models.policy import load_policy
from clotho.models.policy_model import PolicyModel
from clotho.models.turns import TurnBudget
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.model import ModelSection
from clotho.training.update import PolicyLearner
from protocols.sampling import Completion, SampleRequest, Sampling
from protocols.step import WeightsReady
from tests import model_lanes
from tests.learner_settings import learner_settings, policy_settings
from tests.saved_models import save
from tests.training.policies_and_groups import random_groups
from training_run.evaluation.held_out import PinnedSampler, held_out_requests
from training_run.parity_check import ParityChecker, ParitySample
from training_run.serving import swap_weights

VOCABULARY, UPDATES = 64, 3
SAMPLING = Sampling(max_tokens=24, ignore_eos=True)
ENGINE = EngineSection(max_num_seqs=16, kv_policy="recompute")
LEARNER = learner_settings(learning_rate=3e-2, schedule="constant", max_turn_ms=1.0)


class ConcurrentRun:
    """A policy that is decoded, trained and evaluated at once.

    weights: parameters by version. sampled: prompts with completions of the served policy.
    """

    def __init__(self, compute: Compute, directory: Path, *, seed: int) -> None:
        self.compute, self.random = compute, Random(seed)
        self.policy = compute.learner.submit(
            lambda: load_policy(
                ModelSection(path=str(save(directory / "base"))),
                policy_settings(rank=4, scale=4.0),
                seed=0,
                keep_reference=False,
            )
        ).result()
        self.learner = compute.learner.submit(self._make_learner).result()
        self.engine = compute.decode.submit(lambda: DecodeEngine(self.policy, ENGINE)).result()
        compute.decode.attach(self.engine)
        self.sampler = EngineSampler(compute.decode.submit, self.engine)
        turns = TurnBudget(0.001, compute.evaluation.lane)
        self.pinned = compute.evaluation.submit(lambda: PinnedSampler(self.policy, ENGINE, turns)).result()
        self.checker = compute.parity.submit(self._make_checker).result()
        self.weights: dict[int, Parameters] = {0: self.policy.trainable()}
        self.sampled: list[tuple[tuple[int, ...], Completion]] = []
        self.aborted = self.evaluated = 0
        self.over = False

    def _make_learner(self) -> PolicyLearner:
        lane = self.compute.learner.lane
        return PolicyLearner(self.policy, LEARNER, SamplingSection(), steps=UPDATES, lane=lane)

    def _make_checker(self) -> ParityChecker:
        decode, lane = self.compute.decode.submit, self.compute.parity.lane
        return ParityChecker(self.policy, self.engine, settings=ENGINE, learner=LEARNER, decode=decode, lane=lane)

    async def run(self) -> None:
        """Run until the last update is served."""
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(self._sample)
            tasks.start_soon(self._abort)
            tasks.start_soon(self._evaluate)
            await self._learn()
            self.over = True

    async def _learn(self) -> None:
        for step in range(1, UPDATES + 1):
            groups = random_groups(VOCABULARY, seed=step)
            await finish(self.compute.learner.submit(lambda: self.learner.update(groups, step=step)))  # noqa: B023
            if step % 3:
                healthy = self.learner.snapshot()
            else:
                await finish(self.compute.learner.submit(lambda: self.learner.roll_back(healthy, rate=0.5)))  # noqa: B023
            version, parameters = self.learner.version, self.learner.parameters
            self.weights[version] = parameters
            ready = WeightsReady(version=version, step=step, fingerprint=self.learner.fingerprint)
            await swap_weights(self.compute.decode, self.policy, self.engine, "recompute", parameters, ready)
            sample = ParitySample((1, 2, 3), ((4, 5), (6, 7)))
            report = await finish(
                self.compute.parity.submit(lambda: self.checker.check(sample, parameters, temperature=1.0))  # noqa: B023
            )
            assert report.served_kl == 0.0

    def _request(self) -> SampleRequest:
        prompt = tuple(self.random.randrange(2, VOCABULARY) for _ in range(self.random.randrange(2, 20)))
        seeds = tuple(self.random.randrange(2**31) for _ in range(3))
        return SampleRequest(prompt=prompt, sampling=SAMPLING, seeds=seeds, stream=True)

    async def _sample(self) -> None:
        while not self.over:
            request = self._request()
            self.sampled += [(request.prompt, one) for one in await self.sampler.complete(request)]

    async def _abort(self) -> None:
        while not self.over:
            left = self.random.randrange(1, 40)
            async with aclosing(self.sampler.stream(self._request())) as events:
                async for _ in events:
                    left -= 1
                    if not left:
                        break
            self.aborted += 1

    async def _evaluate(self) -> None:
        prompts = [(5, 9), (33, 2, 17)]
        requests = held_out_requests(prompts, SAMPLING, samples=1, seed=0)
        while not self.over:
            version = self.random.choice(list(self.weights))
            parameters = self.weights[version]
            found = await finish(
                self.compute.evaluation.submit(
                    lambda: self.pinned.completions(parameters, requests, version=version)  # noqa: B023
                )
            )
            for request, completions in zip(requests, found, strict=True):
                assert {one for completion in completions for one in completion.versions} == {version}
                if request.sampling.temperature:
                    self.sampled += [(request.prompt, completion) for completion in completions]
            self.evaluated += 1


def logprobs(
    model: PolicyModel, parameters: Parameters, sampled: Sequence[tuple[Sequence[int], Completion]]
) -> list[np.ndarray]:
    """Return the log-probability of each token of the completions, from one forward pass without a cache."""
    model.use(parameters)
    rows = [[*prompt, *completion.tokens] for prompt, completion in sampled]
    longest = max(map(len, rows))
    tokens_N_S = mx.array([row + [0] * (longest - len(row)) for row in rows])
    logits_N_S_V = model.model(tokens_N_S).astype(mx.float32)
    logp_N_S_V = logits_N_S_V - mx.logsumexp(logits_N_S_V, axis=-1, keepdims=True)
    logp_N_S = np.array(mx.take_along_axis(logp_N_S_V[:, :-1], tokens_N_S[:, 1:, None], axis=-1)[..., 0])
    return [logp_N_S[n, len(prompt) - 1 : len(rows[n]) - 1] for n, (prompt, _) in enumerate(sampled)]


@pytest.mark.parametrize("slots", [1, 2])
async def test_every_token_has_the_log_probability_of_its_recorded_version(tmp_path: Path, slots: int) -> None:
    """While the policy is updated, swapped, rolled back, evaluated with other weights, and requests are aborted."""
    compute = Compute(decode_share=0.5, slots=slots)
    compute.start()
    try:
        with anyio.fail_after(120):
            run = ConcurrentRun(compute, tmp_path, seed=slots)
            await run.run()
    finally:
        assert compute.stop(timeout=60)
    assert min(run.aborted, run.evaluated, len(run.sampled)) > 0
    assert len(run.weights) == UPDATES + 1
    model = run.policy.copy_model()
    by_version = {version: logprobs(model, parameters, run.sampled) for version, parameters in run.weights.items()}
    differences = []
    for i, (_, completion) in enumerate(run.sampled):
        found = np.array(completion.logprobs)
        expected = np.array([by_version[version][i][n] for n, version in enumerate(completion.versions)])
        np.testing.assert_allclose(found, expected, atol=model_lanes.atol(1e-4))
        others = [by_version[version][i] for version in run.weights if version not in completion.versions]
        differences += [float(np.abs(found - other).max()) for other in others]
    assert np.median(differences) > 1e-2, "other versions have other log-probabilities"
