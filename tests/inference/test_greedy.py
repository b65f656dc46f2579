"""Greedy answers of pinned weights: the same, whatever is served and whatever happens beside."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from clotho.config.schema import EngineSection, ModelSection
from clotho.inference import DecodeEngine
from clotho.inference import greedy as evaluation
from clotho.inference.greedy import greedy_completions
from clotho.models.policy import Policy, load_policy
from protocols.errors import RequestError
from protocols.sampling import SampleRequest, Sampling
from tests.learner_settings import policy_settings
from tests.saved_models import save
from tests.training.policies_and_groups import finish, same_bits

SAMPLING = Sampling(temperature=0.7, max_tokens=8, ignore_eos=True)
PROMPTS = [(5, 9, 33), (2, 17), (60, 4, 4, 11), (7,), (21, 22), (9, 9, 9)]


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """A tiny policy with an adapter."""
    model = ModelSection(path=str(save(tmp_path / "base")))
    return load_policy(model, policy_settings(rank=2, scale=2.0), seed=0, keep_reference=False)


def moved(policy: Policy, shift: float) -> Any:
    """The served parameters, every number moved."""
    parameters = tree_map(lambda array: array + shift, policy.trainable())
    mx.eval(parameters)
    return parameters


def answers(policy: Policy, parameters: Any, prompts: Any = PROMPTS, **keys: Any) -> Any:
    """The job."""
    settings = {"sampling": SAMPLING, "settings": EngineSection(max_num_seqs=4), "version": 3, **keys}
    return greedy_completions(policy, parameters, prompts=prompts, **settings)


def greedy_twin(policy: Policy, parameters: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Slow and obvious: the whole sequence anew for each token."""
    tokens = list(prompt)
    with policy.using(parameters):
        for _ in range(count):
            tokens.append(int(policy.model(mx.array([tokens]))[0, -1].argmax().item()))
    return tuple(tokens[len(prompt) :])


def test_answers_are_greedy_and_in_the_order_of_the_prompts(policy: Policy) -> None:
    """Each token is the most probable one under the pinned weights, and names their version."""
    pinned = moved(policy, 0.4)
    completions = finish(answers(policy, pinned))
    assert [c.tokens for c in completions] == [greedy_twin(policy, pinned, prompt, 8) for prompt in PROMPTS]
    assert [c.tokens for c in completions] != [greedy_twin(policy, policy.trainable(), p, 8) for p in PROMPTS]
    assert {version for c in completions for version in c.versions} == {3}


def test_between_turns_the_served_weights_compute_and_may_be_swapped(policy: Policy) -> None:
    """Neither does the measurement see the swap, nor do those who are served see the measurement."""
    pinned, newer = moved(policy, 0.4), moved(policy, -0.4)
    undisturbed = finish(answers(policy, pinned))
    job = answers(policy, pinned)
    next(job)
    policy.publish(newer, version=9, step=9, fingerprint="newer")
    logits = policy.model(mx.array([[5, 9]]))
    seen: list[bool] = []

    def observed() -> Generator[None, None, Any]:
        while True:
            seen.append(bool(mx.array_equal(policy.model(mx.array([[5, 9]])), logits).item()))
            try:
                next(job)
            except StopIteration as stop:
                return stop.value
            yield

    assert finish(observed()) == undisturbed
    assert all(seen)
    assert len(seen) > 4, "one tick per turn"
    assert same_bits(policy.trainable(), newer)


def test_no_more_than_two_batches_are_ever_in_the_line(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand held-out problems take no more memory than ten."""
    pending = []

    class Counting(DecodeEngine):
        def tick(self) -> int:
            stats = self.stats()
            pending.append(stats.running_rows + stats.waiting_rows)
            return super().tick()

    monkeypatch.setattr(evaluation, "DecodeEngine", Counting)
    prompts = [(3 + i % 40,) for i in range(60)]
    completions = finish(answers(policy, policy.trainable(), prompts))
    assert len(completions) == 60
    assert completions[:40] == finish(answers(policy, policy.trainable(), prompts[:40]))
    assert max(pending) == 8


def test_what_does_not_fit_is_refused(policy: Policy) -> None:
    """A prompt as long as the context leaves no room for an answer."""
    with pytest.raises(RequestError, match="128"):
        next(answers(policy, policy.trainable(), [(5,) * 128]))
    assert finish(answers(policy, policy.trainable(), [])) == []


def test_an_engine_that_gives_up_is_a_failure(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accuracy over the rest would be a wrong number; the served weights are back in any case."""
    served = policy.trainable()

    class Failing(DecodeEngine):
        def submit(self, request: SampleRequest, listener: Any) -> int:
            number = super().submit(request, listener)
            if number == 3:
                self._sender.fail(self._sender.requests[number], "out of memory")
            return number

    monkeypatch.setattr(evaluation, "DecodeEngine", Failing)
    with pytest.raises(RuntimeError, match="evaluation failed: out of memory"):
        finish(answers(policy, moved(policy, 0.4)))
    assert same_bits(policy.trainable(), served)


def test_closed_early_it_leaves_the_served_weights(policy: Policy) -> None:
    """A run that is stopped closes the job between two turns."""
    logits = policy.model(mx.array([[5, 9]]))
    job = answers(policy, moved(policy, 0.4))
    next(job)
    job.close()
    assert mx.array_equal(policy.model(mx.array([[5, 9]])), logits).item()
