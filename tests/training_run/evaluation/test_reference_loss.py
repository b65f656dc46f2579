"""The loss of reference completions under one policy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from clotho.models.parameters import Parameters
from clotho.models.policy import Policy, load_policy
from clotho.scoring.prompt_logprobs import PromptScorer
from clotho.settings.model import ModelSection
from tests import model_lanes
from tests.learner_settings import policy_settings
from tests.saved_models import save
from tests.training.policies_and_groups import model_with
from training_run.evaluation.held_out import reference_losses

PROMPTS = [(5, 9, 33), (2, 17), (60, 4, 4, 11), (7,)]
REFERENCES = [(4, 8, 21), (), (9,), (3, 3, 3, 3, 3)]


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """Return a tiny policy with an adapter."""
    model = ModelSection(path=str(save(tmp_path / "base")))
    return load_policy(model, policy_settings(rank=2, scale=2.0), seed=0, keep_reference=False)


def nats(policy: Policy, parameters: Parameters, prompt: tuple[int, ...], reference: tuple[int, ...]) -> float:
    """Return the negative log-likelihood from one forward pass without a cache."""
    logits_S_V = model_with(policy, parameters)(mx.array([[*prompt, *reference]]))[0].astype(mx.float32)
    logp_S_V = logits_S_V - mx.logsumexp(logits_S_V, axis=-1, keepdims=True)
    return -sum(float(logp_S_V[len(prompt) - 1 + i, token].item()) for i, token in enumerate(reference))


@pytest.mark.parametrize("chunk", [2, 512])
def test_the_loss_is_the_negative_log_likelihood_of_the_tokens_after_the_prompt(policy: Policy, chunk: int) -> None:
    """Under the given parameters, in one chunk or several, whatever is served."""
    served = policy.trainable()
    pinned = tree_map(lambda array: array + 0.25, served)
    score = partial(PromptScorer(policy.copy_model(), chunk=chunk).score, pinned, version=3)
    found = reference_losses(score, PROMPTS, REFERENCES, context_length=128)
    assert [loss.tokens if loss else None for loss in found] == [3, None, 1, 5]
    scored = [(p, r, loss.nats) for p, r, loss in zip(PROMPTS, REFERENCES, found, strict=True) if loss]
    measured = [value for _, _, value in scored]
    assert measured == pytest.approx([nats(policy, pinned, p, r) for p, r, _ in scored], abs=model_lanes.atol(2e-4))
    assert measured != pytest.approx([nats(policy, served, p, r) for p, r, _ in scored], abs=0.01)


def test_a_reference_beyond_the_context_has_no_loss(policy: Policy) -> None:
    """Prompt and reference together may fill the context."""
    score = partial(PromptScorer(policy.copy_model(), chunk=512).score, policy.trainable(), version=0)
    found = reference_losses(score, PROMPTS[:1] * 2, [(4, 8, 21), (4, 8)], context_length=5)
    assert [loss is None for loss in found] == [True, False]
