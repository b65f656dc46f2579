"""The loss of demonstrations: against float64, and against the trainer of mlx-lm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.trainer import default_loss
from msgspec.structs import replace
from numpy.typing import NDArray

from clotho.models.parameters import flat
from clotho.settings.engine import SamplingSection
from clotho.training.update import PolicyLearner
from protocols.rollout import ScoredGroup
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import Bigram, BigramPolicy, scored_group, tiny_policy

Array = NDArray[np.float64]
RATE = 1.0


def demonstrations(count: int, vocabulary: int, *, length: int | None = None) -> list[ScoredGroup]:
    """Return groups of one sequence, about half of whose tokens are learned. length: of all; None: 2 to 9."""
    rng = np.random.default_rng(5)
    made = []
    for number in range(count):
        tokens = rng.integers(0, vocabulary, length or int(rng.integers(2, 10))).tolist()
        learned = tuple(bool(one) for one in rng.random(len(tokens)) < 0.5)
        learned = (*learned[:-1], True)
        group = scored_group([tokens], [0.0], group_id=number)
        (completion,) = group.group.completions
        zeros = (0.0,) * len(tokens)
        completion = replace(completion, logprobs=zeros, sampled=learned, versions=(0,) * len(tokens))
        made.append(
            replace(
                group,
                group=replace(group.group, completions=(completion,)),
                token_advantages=(tuple(map(float, learned)),),
            )
        )
    return made


def learner(policy: Any, **keys: Any) -> PolicyLearner:
    """Return a learner whose step is the gradient times the rate."""
    keys = {"optimizer": "sgd", "learning_rate": RATE, "momentum": 0.0, "max_grad_norm": 0.0, **keys}
    settings = learner_settings(objective="sft", warmup_steps=0, **keys)
    return PolicyLearner(policy, settings, SamplingSection(), steps=9)


def bigram_loss(embed: Array, head: Array, groups: list[ScoredGroup]) -> tuple[float, Array, Array]:
    """Return the mean of -log p over the learned tokens, and its gradient, in float64."""
    loss, d_embed, d_head, count = 0.0, np.zeros_like(embed), np.zeros_like(head), 0
    for group in groups:
        (completion,) = group.group.completions
        before = [*group.group.prompt.tokens, *completion.tokens][len(group.group.prompt.tokens) - 1 : -1]
        for source, target, yes in zip(before, completion.tokens, completion.sampled, strict=True):
            if not yes:
                continue
            z_V = head @ embed[source]
            p_V = np.exp(z_V - z_V.max())
            p_V /= p_V.sum()
            loss, count = loss - float(np.log(p_V[target])), count + 1
            p_V[target] -= 1
            d_embed[source] += head.T @ p_V
            d_head += np.outer(p_V, embed[source])
    return loss / count, d_embed / count, d_head / count


@pytest.mark.parametrize("keys", [{"layout": "padded"}, {"layout": "padded", "micro_batch_tokens": 8}])
def test_loss_and_gradient_are_those_of_float64(keys: dict[str, Any]) -> None:
    """To 1e-6, for one micro-batch and for several; ratios to a sampler that does not exist are 1."""
    policy, groups = BigramPolicy(), demonstrations(6, 5)
    weights = {name: np.array(array, dtype=np.float64) for name, array in flat(policy.trainable()).items()}
    embed, head = weights["model.weight"], weights["lm_head.weight"]
    loss, d_embed, d_head = bigram_loss(embed, head, groups)
    update = learner(policy, **keys).update(groups)
    after = {name: np.array(array, dtype=np.float64) for name, array in flat(update.parameters).items()}
    assert update.metrics.loss == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose((embed - after["model.weight"]) / RATE, d_embed, atol=1e-6)
    np.testing.assert_allclose((head - after["lm_head.weight"]) / RATE, d_head, atol=1e-6)
    metrics = update.metrics
    assert (metrics.ratio_mean, metrics.ess, metrics.completion_ess, metrics.mismatch_kl) == (1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("layout", ["padded", "packed", "auto"])
def test_the_loss_is_that_of_the_trainer_of_mlx_lm(layout: str) -> None:
    """To 1e-5 on the same batch, in each layout; all tokens from the first learned one on are learned."""
    groups = demonstrations(5, 32, length=12)
    policy: Any = tiny_policy()
    rows, spans, whole = [], [], []
    for group in groups:
        (completion,) = group.group.completions
        start = completion.sampled.index(True)
        learned = tuple(at >= start for at in range(12))
        tokens = [*group.group.prompt.tokens, *completion.tokens]
        rows.append(tokens)
        spans.append((len(group.group.prompt.tokens) + start, len(tokens) - 1))
        completion = replace(completion, sampled=learned)
        whole.append(
            replace(
                group,
                group=replace(group.group, completions=(completion,)),
                token_advantages=(tuple(map(float, learned)),),
            )
        )
    trainer: Any = default_loss
    theirs, tokens = trainer(policy.model, mx.array(rows), mx.array(spans))
    update = learner(policy, layout=layout).update(whole)
    assert update.metrics.trained_tokens == tokens.item()
    assert update.metrics.loss == pytest.approx(theirs.item(), abs=1e-5)


def test_a_model_without_layers_of_its_own_is_trained_in_full() -> None:
    """The bigram's arrays are float32, and all of them move."""
    policy = BigramPolicy(Bigram())
    assert isinstance(policy.model, nn.Module)
    update = learner(policy, layout="padded").update(demonstrations(6, 5))
    before = flat(policy.trainable())
    assert all(
        not np.array_equal(np.array(before[name]), np.array(one)) for name, one in flat(update.parameters).items()
    )
