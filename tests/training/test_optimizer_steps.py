"""The values of tokens that an update records, against loops in float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from clotho.scoring.sequences import MicroBatch
from clotho.settings.engine import SamplingSection
from clotho.training.gradient import LearnerModel
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizer_steps import MetricTotals
from clotho.training.update import PolicyLearner
from protocols.rollout import ScoredGroup
from protocols.step import Cut, TokenValues
from tests.learner_settings import OF_SAMPLES, learner_settings, short_names
from tests.oracle.advantages import advantages
from tests.oracle.policy_loss import Example, cuts, gradient_shares
from tests.training.policies_and_groups import Bigram, BigramPolicy, same_bits, scored_group
from training_run.update_values import TokenRecord

WIDE = {"clip_low": 0.1, "clip_high": 0.1}
TO_SAMPLER: dict[str, Any] = {"ratio_reference": "sampler", "correction": "off"}
BATCH_START = {"objective": "grpo", "ratio_reference": "batch_start"}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"objective": name} for name in OF_SAMPLES},
    **{f"{name}, wide": {"objective": name, **WIDE} for name in ("dppo_tv", "cispo")},
    **{f"{name}, wide": {"objective": name, **WIDE, **TO_SAMPLER} for name in ("gspo", "gspo_token", "rloo")},
    **{
        f"correction {kind}": {**BATCH_START, "correction": kind, "correction_low": 0.5, "correction_high": 1.5}
        for kind in ("truncate", "mask", "truncate_sequence", "reject_sequence", "reject_geometric")
    },
    "kl": {"objective": "grpo", "kl_beta": 0.3, "kl_estimator": "k3"},
    "entropy bonus": {"objective": "grpo", "entropy_weight": 0.3},
    "dual clip": {"objective": "grpo", "dual_clip": 1.5},
    "outliers": {"objective": "grpo", "outlier_low": 0.2, "outlier_high": 4.0},
    "off-policy mask": {"objective": "grpo", "off_policy_mask": 0.2},
}


def groups() -> list[ScoredGroup]:
    """Two groups of three completions of one to seven tokens, sampled by a policy that differs from the learner's."""
    rng = np.random.default_rng(3)
    made = []
    for number in range(2):
        tokens = [rng.integers(0, 5, length).tolist() for length in rng.integers(1, 8, 3)]
        group = scored_group(tokens, rng.normal(size=3).tolist(), group_id=number)
        noisy = (
            replace(one, logprobs=tuple(float(np.float32(x)) for x in logp_T + rng.normal(0, 0.5, len(logp_T))))
            for one, logp_T in (
                (c, forced(Bigram(), group.group.prompt.tokens, c.tokens)) for c in group.group.completions
            )
        )
        made.append(replace(group, group=replace(group.group, completions=tuple(noisy))))
    return made


def forced(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> NDArray[np.float64]:
    """Log-probabilities of tokens under a bigram model."""
    embed, head = (np.array(layer.weight, dtype=np.float64) for layer in (model.model, model.lm_head))
    before = (*prompt, *tokens)[len(prompt) - 1 : -1]
    z_T_V = embed[list(before)] @ head.T
    logp_T: NDArray[np.float64] = z_T_V[range(len(tokens)), list(tokens)] - np.log(np.exp(z_T_V).sum(axis=-1))
    return logp_T


def sampled_with_rounding(kl: float, tokens: int) -> ScoredGroup:
    """A group of the learner's own policy, with independent noise of this mean KL (nats) in the records."""
    rng = np.random.default_rng(0)
    group = scored_group(rng.integers(0, 5, (16, tokens)).tolist(), [1.0, 0.0] * 8)
    completions = tuple(
        replace(c, logprobs=tuple(forced(Bigram(), (1, 2), c.tokens) - rng.normal(-kl, (2 * kl) ** 0.5, tokens)))
        for c in group.group.completions
    )
    return replace(group, group=replace(group.group, completions=completions))


def learner(policy: BigramPolicy, *, token_values: bool = True, **keys: Any) -> PolicyLearner:
    """Return a learner without momentum."""
    settings = learner_settings(learning_rate=1e-2, layout="padded", micro_batch_tokens=24, **keys)
    return PolicyLearner(policy, settings, SamplingSection(), steps=9, recorder=TokenRecord if token_values else None)


def columns(values: TokenValues) -> tuple[NDArray[np.float32], NDArray[np.float32], list[int], NDArray[np.float32]]:
    """Log-probability, advantage, cut and gradient share of the tokens of a completion."""
    logp_T, advantage_T, share_T = (
        np.frombuffer(data, dtype="<f4") for data in (values.learner_logprob, values.advantage, values.gradient_share)
    )
    return logp_T, advantage_T, list(values.cut), share_T


@pytest.mark.parametrize("case", CASES)
def test_recorded_values_equal_the_loops(case: str) -> None:
    """Log-probability, advantage, cut and gradient share of every token, to 1e-5."""
    policy, batch = BigramPolicy(), groups()
    reference = BigramPolicy()
    reference.use_reference()
    one = learner(policy, **CASES[case])
    update = one.update(batch)
    assert update.applied
    names = short_names(one._settings)
    given = advantages(
        names.advantage,
        [group.rewards for group in batch],
        spread=names.advantage_deviation,
        epsilon=names.advantage_epsilon,
    )
    examples, rows = [], []
    for group, own in zip(batch, given, strict=True):
        for completion, advantage in zip(group.group.completions, own, strict=True):
            logp_T = forced(policy.model, group.group.prompt.tokens, completion.tokens).tolist()
            reference_T = forced(reference.model, group.group.prompt.tokens, completion.tokens).tolist()
            T = len(logp_T)
            rows.append(logp_T)
            examples.append(
                Example(
                    group=group.group.prompt.group_id,
                    behaviour=list(completion.logprobs),
                    proximal=logp_T,
                    reference=reference_T,
                    advantage=[advantage] * T,
                    entropy=[0.0] * T,
                    learned=[True] * T,
                )
            )
    shares = gradient_shares(examples, rows, settings=one._settings, max_tokens=SamplingSection().max_tokens)
    found = [columns(values) for group in update.tokens for values in group]
    for (logp_T, advantage_T, cut_T, share_T), e, expected_T, expected in zip(
        found, examples, rows, shares, strict=True
    ):
        np.testing.assert_allclose(logp_T, expected_T, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(advantage_T, e.advantage, rtol=1e-5)
        assert cut_T == cuts(e, expected_T, one._settings)
        np.testing.assert_allclose(share_T, expected, rtol=1e-5, atol=1e-8)


def test_cuts_of_all_kinds_occur_in_the_cases() -> None:
    """Otherwise the comparison proves nothing."""
    kinds = {
        case: {
            value for group in learner(BigramPolicy(), **keys).update(groups()).tokens for v in group for value in v.cut
        }
        for case, keys in CASES.items()
        if case in ("grpo", "correction truncate", "correction mask", "outliers")
    }
    assert kinds["grpo"] == {Cut.NONE, Cut.CLIP}
    assert kinds["correction truncate"] >= {Cut.CORRECTION}
    assert kinds["correction mask"] >= {Cut.CORRECTION, Cut.NONE}
    assert Cut.MASK in kinds["outliers"]


def test_values_are_those_of_the_first_gradient_and_recording_changes_no_weight() -> None:
    """Two epochs of two minibatches: every token once, and shares that add up to 1."""
    results = [
        learner(BigramPolicy(), token_values=on, num_minibatches=2, update_epochs=2).update(groups())
        for on in (True, False)
    ]
    assert same_bits(results[0].parameters, results[1].parameters)
    assert results[1].tokens == ()
    found = [columns(values) for group in results[0].tokens for values in group]
    assert sum(float(share_T.sum()) for *_, share_T in found) == pytest.approx(1.0)
    initial = [
        forced(Bigram(), group.group.prompt.tokens, c.tokens) for group in groups() for c in group.group.completions
    ]
    before = [np.allclose(logp_T, row, atol=1e-5) for (logp_T, *_), row in zip(found, initial, strict=True)]
    assert before in ([True] * 3 + [False] * 3, [False] * 3 + [True] * 3)


def test_replayed_groups_have_a_share_of_the_gradient_and_no_values() -> None:
    """The shares of the batch add up to less than 1."""
    first, second = groups()
    (values,) = learner(BigramPolicy()).update([first], replayed=[second]).tokens
    assert 0.0 < sum(float(columns(one)[-1].sum()) for one in values) < 0.99


def test_tokens_and_completions_that_are_not_trained_on_are_masked() -> None:
    """Tokens of an environment, truncated completions, and completions whose advantage the environment sets to 0."""
    group = groups()[0]
    first, second, third = group.group.completions
    context = (False, *(True,) * (len(first.tokens) - 1))
    completions = (replace(first, sampled=context), replace(second, finish_reason="length"), third)
    group = replace(group, group=replace(group.group, completions=completions), zero_advantage=(False, False, True))
    (values,) = learner(BigramPolicy(), mask_truncated=True).update([group]).tokens
    (logp_T, _, cut_T, share_T), truncated, silent = map(columns, values)
    assert (np.isnan(logp_T[0]), cut_T[0], share_T[0]) == (True, Cut.MASK, 0.0)
    assert np.isfinite(logp_T[1:]).all()
    assert Cut.MASK not in cut_T[1:]
    assert np.isnan(truncated[0]).all()
    assert set(truncated[2]) == set(silent[2]) == {Cut.MASK}
    assert np.isfinite(silent[0]).all()
    assert float(share_T.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_the_rounding_of_bfloat16_cuts_at_most_two_percent_without_a_move_of_the_policy(name: str) -> None:
    """Completions of 300 tokens with the mean KL of 28 layers in docs/numerics-internals.md, and default settings.

    A ratio of completions to the sampler shows that the noise is there: a quarter is cut.
    """
    group = sampled_with_rounding(1.2e-3, 300)
    assert learner(BigramPolicy(), objective=name).update([group]).metrics.unmoved_cut_fraction <= 0.02
    if name in ("gspo", "gspo_token", "rloo"):
        refused = learner(BigramPolicy(), objective=name, **TO_SAMPLER).update([group])
        assert refused.metrics.unmoved_cut_fraction > 0.25


@pytest.mark.parametrize(
    ("keys", "scored"), [({}, 0), ({"num_minibatches": 2}, 3), ({"num_minibatches": 2, "update_epochs": 2}, 6)]
)
def test_the_first_optimizer_step_takes_the_policy_at_the_start_of_the_batch_from_its_own_pass(
    keys: dict[str, Any], scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of three completions: scored before the first step are those that a later step needs.

    The narrow clip range of gspo cuts none in the first step, although another pass may round differently.
    """
    passes = []

    def rounded(model: LearnerModel, micro: MicroBatch) -> mx.array:
        passes.append(micro.sequences)
        return computed(model, micro) + 0.01

    computed = LearnerModel.logprobs
    monkeypatch.setattr(LearnerModel, "logprobs", rounded)
    metrics = learner(BigramPolicy(), objective="gspo", correction="off", **keys).update(groups()).metrics
    assert sum(passes) == scored
    assert metrics.unmoved_cut_fraction == 0.0


def test_an_update_without_a_token_has_neutral_metrics() -> None:
    """Ratios, shares and the step scale are 1, what has no value is null, and the rest is 0."""
    coefficients = LossCoefficients(kl_beta=0.25, entropy_coef=0.5)
    metrics = MetricTotals().metrics(tokens=0, learning_rate=0.125, loss_coefficients=coefficients, steps=0)
    ones = dict.fromkeys(("ratio_mean", "ess", "completion_ess", "step_scale"), 1.0)
    given = {"learning_rate": 0.125, "kl_beta": 0.25, "entropy_coef": 0.5}
    assert {name: value for name, value in asdict(metrics).items() if value} == ones | given
