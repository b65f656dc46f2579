"""Completions of pinned weights are independent of the served weights and of other requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from msgspec.structs import replace

from clotho.inference.engine import DecodeEngine
from clotho.lanes.arbiter import WorkCancelled
from clotho.models.policy import Policy, load_policy
from clotho.models.turns import UNSHARED, TurnBudget, Turns
from clotho.settings.engine import EngineSection
from clotho.settings.model import ModelSection
from protocols.errors import RequestError
from protocols.sampling import Completion, SampleRequest, Sampling
from tests.learner_settings import policy_settings
from tests.recorded_turns import RecordedTurns
from tests.saved_models import save
from tests.training.policies_and_groups import model_with, same_bits
from training_run.evaluation import held_out
from training_run.evaluation.held_out import PinnedSampler, by_problem, held_out_requests

SAMPLING = Sampling(temperature=0.7, max_tokens=8, ignore_eos=True)
PROMPTS = [(5, 9, 33), (2, 17), (60, 4, 4, 11), (7,), (21, 22), (9, 9, 9)]


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """Return a tiny policy with an adapter."""
    model = ModelSection(path=str(save(tmp_path / "base")))
    return load_policy(model, policy_settings(rank=2, scale=2.0), seed=0, keep_reference=False)


def moved(policy: Policy, shift: float) -> Any:
    """Return the served parameters with every value shifted."""
    parameters = tree_map(lambda array: array + shift, policy.trainable())
    mx.eval(parameters)
    return parameters


def completed(
    policy: Policy, parameters: Any, prompts: Any = PROMPTS, *, samples: int = 0, seed: int = 7, lane: Turns = UNSHARED
) -> list[list[Completion]]:
    """Return the completions of each problem by a sampler of its own."""
    requests = held_out_requests(prompts, SAMPLING, samples=samples, seed=seed)
    sampler = PinnedSampler(policy, EngineSection(max_num_seqs=4), TurnBudget(0.0, lane))
    return by_problem(sampler.completions(parameters, requests, version=3), len(prompts))


def greedy_reference(policy: Policy, parameters: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return greedy completions with one full forward pass per token."""
    tokens = list(prompt)
    model = model_with(policy, parameters)
    for _ in range(count):
        tokens.append(int(model(mx.array([tokens]))[0, -1].argmax().item()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.lanes("4bit")
def test_completions_are_greedy_and_in_the_order_of_the_prompts(policy: Policy) -> None:
    """Each token is the most probable one under the pinned weights and has their version."""
    pinned = moved(policy, 0.4)
    completions = [completion for (completion,) in completed(policy, pinned)]
    assert [c.tokens for c in completions] == [greedy_reference(policy, pinned, prompt, 8) for prompt in PROMPTS]
    assert [c.tokens[:3] for c in completions] != [greedy_reference(policy, policy.trainable(), p, 3) for p in PROMPTS]
    assert {version for c in completions for version in c.versions} == {3}


def test_sampled_completions_depend_on_seed_problem_and_number(policy: Policy) -> None:
    """They do not change the greedy completions, and the first ones are the same with more samples."""

    def tokens(prompts: Any = PROMPTS, **settings: Any) -> list[list[tuple[int, ...]]]:
        found = completed(policy, policy.trainable(), prompts, **settings)
        return [[completion.tokens for completion in completions] for completions in found]

    greedy, two, three, other = tokens(), tokens(samples=2), tokens(samples=3), tokens(samples=2, seed=8)
    assert [found[:1] for found in two] == [found[:1] for found in other] == greedy
    assert [found[:3] for found in three] == two
    assert other != two
    assert len({drawn for found in three for drawn in found[1:]}) == 18
    first, second = tokens(PROMPTS[:1] * 2, samples=1)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_the_served_weights_may_change_meanwhile(policy: Policy) -> None:
    """The evaluation is unaffected by a swap, and served forward passes by the evaluation."""
    pinned, newer = moved(policy, 0.4), moved(policy, -0.4)
    undisturbed = completed(policy, pinned)
    policy.publish(newer, version=9, step=9, fingerprint="newer")
    logits, older = policy.model(mx.array([[5, 9]])), moved(policy, 0.1)
    policy.publish(older, version=8, step=8, fingerprint="older")
    seen: list[bool] = []

    def between(number: int) -> None:
        policy.publish(newer, version=9, step=9, fingerprint="newer")
        seen.append(bool(mx.array_equal(policy.model(mx.array([[5, 9]])), logits).item()))

    assert completed(policy, pinned, lane=RecordedTurns(between)) == undisturbed
    assert all(seen)
    assert len(seen) > 4, "one decode step per turn"
    assert same_bits(policy.trainable(), newer)


def test_at_most_two_batches_are_submitted_at_a_time(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory does not grow with the number of held-out problems."""
    pending = []

    class Counting(DecodeEngine):
        def tick(self) -> int:
            stats = self.stats()
            pending.append(stats.running_rows + stats.waiting_rows)
            return super().tick()

    monkeypatch.setattr(held_out, "DecodeEngine", Counting)
    prompts = [(3 + i % 40,) for i in range(60)]
    completions = completed(policy, policy.trainable(), prompts)
    assert len(completions) == 60
    assert completions[:40] == completed(policy, policy.trainable(), prompts[:40])
    assert max(pending) == 8


def test_a_prompt_beyond_the_context_is_refused(policy: Policy) -> None:
    """A prompt of the context's length leaves no room for a completion."""
    with pytest.raises(RequestError, match="128"):
        completed(policy, policy.trainable(), [(5,) * 128])
    assert completed(policy, policy.trainable(), []) == []


def test_a_failed_engine_fails_the_evaluation(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """No accuracy of a part of the problems is returned. The served weights stay."""
    served = policy.trainable()

    class Failing(DecodeEngine):
        def submit(self, request: SampleRequest, listener: Any) -> int:
            number = super().submit(request, listener)
            if number == 3:
                self._sender.fail(self._sender.requests[number], "out of memory")
            return number

    monkeypatch.setattr(held_out, "DecodeEngine", Failing)
    with pytest.raises(RuntimeError, match="evaluation failed: out of memory"):
        completed(policy, moved(policy, 0.4))
    assert same_bits(policy.trainable(), served)


def test_a_cancelled_evaluation_does_not_disturb_the_next_one(policy: Policy) -> None:
    """A sampler is used again: requests of an evaluation that was cancelled are gone."""

    def cancel(number: int) -> None:
        if number == 3:
            raise WorkCancelled

    sampler = PinnedSampler(policy, EngineSection(max_num_seqs=4), TurnBudget(0.0, RecordedTurns(cancel)))
    requests = held_out_requests(PROMPTS, SAMPLING, samples=0, seed=7)
    with pytest.raises(WorkCancelled):
        sampler.completions(moved(policy, 0.4), requests, version=3)
    found = sampler.completions(policy.trainable(), requests, version=4)
    assert [list(one) for one in found] == [
        [replace(c, versions=(4,) * len(c.tokens)) for c in one] for one in completed(policy, policy.trainable())
    ]
