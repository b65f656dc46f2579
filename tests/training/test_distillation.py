"""Learning from a teacher: what is reported, what it moves, and what it costs nobody else."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from clotho.models.parameters import flat
from clotho.models.turns import UNDIVIDED
from clotho.scoring.sequences import MicroBatch
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution, TokenScores
from clotho.training.batch import Division, compute_advantages
from clotho.training.gradient import LearnerModel
from protocols.rollout import ScoredGroup, TeacherTokens
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import (
    BigramPolicy,
    learner,
    model_with,
    random_groups,
    same_bits,
    scored_group,
    tiny_policy,
    whole_gradient,
)

pytestmark = pytest.mark.needs_float32


def taught(group: ScoredGroup, tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> ScoredGroup:
    """The same group; a teacher says the same at each of its tokens."""
    rows = [len(one.tokens) for one in group.group.completions]
    return replace(group, teacher=tuple(TeacherTokens(tokens=(tokens,) * n, logprobs=(logprobs,) * n) for n in rows))


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_metric_is_a_mean_over_tokens_with_a_teacher(epochs: int) -> None:
    """Three tokens of one group have one; shares 3/4 and 1/4 of tokens 1 and 4, by hand from the model's own logits."""
    policy = BigramPolicy()
    logits_V_V = np.array(policy.model(mx.arange(5)[None])[0], dtype=np.float64)
    logp_V_V = logits_V_V - np.log(np.exp(logits_V_V).sum(axis=-1, keepdims=True))
    groups = [
        taught(scored_group([[3, 4], [2]], [1.0, 0.0]), (1, 4), (math.log(0.6), math.log(0.2))),
        scored_group([[1, 1, 1], [2]], [1.0, 0.0], group_id=1),
    ]
    one = learner(policy, distillation_weight=0.1, learning_rate=1e-9, update_epochs=epochs)
    expected = np.mean([-(0.75 * logp_V_V[before, 1] + 0.25 * logp_V_V[before, 4]) for before in (2, 3, 2)])
    assert one.update(groups).metrics.distillation_loss == pytest.approx(expected, rel=1e-5)


def test_without_a_teacher_nothing_is_reported() -> None:
    """Nor where the profile learns from none, whatever the groups bring: then it changes no bit."""
    plain = scored_group([[3, 4], [2]], [1.0, 0.0])
    told = taught(plain, (1, 4), (-0.5, -2.0))
    assert learner(BigramPolicy(), distillation_weight=0.1).update([plain]).metrics.distillation_loss == 0.0
    one, two = (learner(BigramPolicy()).update([group]) for group in (plain, told))
    assert two.metrics.distillation_loss == 0.0
    assert same_bits(one.parameters, two.parameters)


def test_the_policy_comes_to_say_what_its_teacher_says() -> None:
    """Rewards are equal: after forty updates the policy has the teacher's probabilities, 7/9 and 2/9 of both."""
    policy = tiny_policy()
    group = taught(scored_group([[3], [4]], [0.0, 0.0]), (9, 17), (math.log(0.7), math.log(0.2)))
    one = learner(policy, distillation_weight=1.0, learning_rate=5e-2, schedule="linear", steps=40)
    reported = []
    for _ in range(40):
        update = one.update([group])
        reported.append(update.metrics.distillation_loss)
    p_V = np.array(mx.softmax(model_with(policy, update.parameters)(mx.array([[1, 2]]))[0, -1]))
    assert p_V[[9, 17]] == pytest.approx([7 / 9, 2 / 9], abs=0.02)
    entropy = -(7 * math.log(7 / 9) + 2 * math.log(2 / 9)) / 9
    assert reported[0] > reported[-1] == pytest.approx(entropy, abs=0.02)


def test_log_probabilities_that_are_known_before_a_gradient_ask_no_teacher() -> None:
    """Reference, proximal policy and movement have nothing to learn from it."""
    asked = []

    class Watching(TeacherForcing):
        def __call__(
            self, micro: MicroBatch, *, distribution: SamplingDistribution, logp_only: bool = False
        ) -> TokenScores:
            asked.append(micro.table.teacher is not None)
            return super().__call__(micro, distribution=distribution, logp_only=logp_only)

    group = taught(scored_group([[3, 4], [2]], [1.0, 0.0]), (1, 4), (-0.5, -2.0))
    settings = learner_settings(distillation_weight=0.1)
    (mini,) = Division(settings, 9, "padded").minibatches([group], compute_advantages([group], (), settings))
    (micro,) = mini.micro_batches
    policy = BigramPolicy()
    forcing = Watching(policy.model, 5)
    assert forcing(micro, distribution=SamplingDistribution(1.0)).cross_entropy_N is not None
    LearnerModel(policy, forcing, SamplingDistribution(1.0), UNDIVIDED).logprobs(micro)
    assert asked == [True, False]


WEIGHT = 0.7


def judged(groups: list[ScoredGroup], *, alone: bool, seed: int = 3) -> list[ScoredGroup]:
    """The same groups; a teacher has scored every token. alone: rewards are not learned."""
    rng = np.random.default_rng(seed)
    found = []
    for group in groups:
        rows = [rng.uniform(-3.0, -0.1, len(one.tokens)).tolist() for one in group.group.completions]
        zero = (True,) * len(rows) if alone else ()
        found.append(replace(group, teacher_logprobs=tuple(map(tuple, rows)), zero_advantage=zero))
    return found


def slow_loss(
    embed: np.ndarray, head: np.ndarray, groups: list[ScoredGroup], *, clips: bool
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the loss of the sampled tokens of a bigram, and its gradients, in float64.

    clips: -min(r A, clip(r, 0.8, 1.28) A) with r = pi / mu; otherwise -min(r, 2) A log pi, whose r has no gradient.
    """
    d_embed, d_head, loss, count = np.zeros_like(embed), np.zeros_like(head), 0.0, 0
    for group in groups:
        mean = sum(group.rewards) / len(group.rewards)
        for i, one in enumerate(group.group.completions):
            before = [group.group.prompt.tokens[-1], *one.tokens]
            for t, token in enumerate(one.tokens):
                z_V = head @ embed[before[t]]
                logp_V = z_V - z_V.max() - np.log(np.exp(z_V - z_V.max()).sum())
                logp, ratio = logp_V[token], np.exp(logp_V[token] - one.logprobs[t])
                reward = 0.0 if group.zero_advantage else group.rewards[i] - mean
                advantage = reward + WEIGHT * (group.teacher_logprobs[i][t] - logp)
                if clips:
                    free, bound = ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage
                    loss, slope = loss - min(free, bound), -free if free <= bound else 0.0
                else:
                    loss, slope = loss - min(ratio, 2.0) * advantage * logp, -min(ratio, 2.0) * advantage
                d_V = slope * ((np.arange(len(z_V)) == token) - np.exp(logp_V))
                d_embed[before[t]] += head.T @ d_V
                d_head += np.outer(d_V, embed[before[t]])
                count += 1
    return loss / count, d_embed / count, d_head / count


@pytest.mark.parametrize("alone", [True, False], ids=["the teacher alone", "beside rewards"])
@pytest.mark.parametrize("objective", ["grpo", "reinforce"])
def test_log_probabilities_of_a_teacher_are_advantages(objective: str, alone: bool) -> None:
    """Loss and gradient are those of float64, to 1e-6: A + weight (log T - log pi), with the clip or the correction.

    A token counts with the importance ratio of its objective, as it does for a reward: the samples are of another
    policy.
    """
    policy = BigramPolicy()
    groups = judged(random_groups(5), alone=alone)
    settings = learner_settings(objective=objective, advantage="mean", distillation_weight=WEIGHT, layout="padded")
    loss, gradient = whole_gradient(policy, groups, settings, distribution=SamplingDistribution(1.0))
    weights = {name: np.array(array, dtype=np.float64) for name, array in flat(policy.trainable()).items()}
    expected, d_embed, d_head = slow_loss(
        weights["model.weight"], weights["lm_head.weight"], groups, clips=objective == "grpo"
    )
    assert loss == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(gradient["model.weight"], d_embed, atol=1e-6)
    np.testing.assert_allclose(gradient["lm_head.weight"], d_head, atol=1e-6)


def test_log_probabilities_of_a_teacher_have_no_effect_with_the_weight_0() -> None:
    """Not a bit of the weights changes."""
    plain = random_groups(5)
    one, two = (learner(BigramPolicy()).update(groups) for groups in (plain, judged(plain, alone=False)))
    assert same_bits(one.parameters, two.parameters)
