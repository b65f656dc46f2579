"""Each completion is learned from at the temperature that it was sampled at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from clotho.models.parameters import flat
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import scored_only
from clotho.scoring.teacher_forcing import TeacherForcing, sampled_tokens_of
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.engine import SamplingSection
from clotho.training.update import PolicyLearner, Update
from protocols.rollout import ScoredGroup
from tests.learner_settings import learner_settings
from tests.scoring.scored import sequence_scores
from tests.training.policies_and_groups import VOCAB, random_groups, tiny_policy
from training_run.update_values import UpdateKl

EVERYWHERE: dict[str, dict[str, Any]] = {
    "reference in the loss": {"kl_beta": 0.3, "reference": "snapshot"},
    "reference in the reward": {"kl_beta": 0.3, "reference": "snapshot", "kl_in": "reward"},
    "proximal policy": {"ratio_reference": "batch_start", "num_minibatches": 2, "correction": "truncate"},
    "interpolated proximal policy": {"ratio_reference": "batch_start_interpolated", "num_minibatches": 2},
    "entropy": {"entropy_weight": 0.3},
}


def updated(groups: list[ScoredGroup], temperature: float, **keys: Any) -> Update:
    """The second update of a run at this temperature, when reference and policy differ."""
    settings = learner_settings(**({"learning_rate": 1e-2, "epsilon": 1e-3, "schedule": "constant"} | keys))
    sampling = SamplingSection(temperature=temperature)
    one = PolicyLearner(tiny_policy(), settings, sampling, steps=3, measure=UpdateKl(1))
    one.update(groups)
    return one.update(groups)


@pytest.mark.parametrize("case", EVERYWHERE)
def test_groups_at_a_temperature_of_their_own_are_as_those_of_a_run_at_it(case: str) -> None:
    """Wherever completions are evaluated: gradient, reference, proximal policy, entropy, movement."""
    plain = random_groups(32)
    own = [replace(group, temperatures=(0.6,) * len(group.rewards)) for group in plain]
    expected, found = updated(plain, 0.6, **EVERYWHERE[case]), updated(own, 1.0, **EVERYWHERE[case])
    other = updated(plain, 1.0, **EVERYWHERE[case])
    for name in ("loss", "kl", "entropy", "ratio_mean", "grad_norm", "update_kl", "mismatch_kl"):
        assert getattr(found.metrics, name) == pytest.approx(getattr(expected.metrics, name), rel=1e-3, abs=1e-6), name
    assert found.metrics.entropy != pytest.approx(other.metrics.entropy, rel=1e-2)
    for name, value in flat(expected.parameters).items():
        np.testing.assert_allclose(np.array(flat(found.parameters)[name]), np.array(value), atol=2e-5)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_completions_of_different_temperatures_share_a_micro_batch(layout: str) -> None:
    """Each has the scores that it has alone at its temperature; one that has none, those of the run's."""
    model, prompt = tiny_policy().model, (3, 1, 4)
    completions = {0.5: (1, 5, 9), 0.0: (2, 6), 2.0: (5, 3, 5, 8)}
    sequences = [scored_only(prompt, tokens)._replace(temperature=t) for t, tokens in completions.items()]
    forcing = TeacherForcing(model, VOCAB, layout=layout)
    (micro,) = build_micro_batches(sequences, layout=layout, budget=1000)
    scores = forcing(micro, distribution=SamplingDistribution(0.8))
    for b, member in enumerate(micro.members):
        sequence = sequences[member]
        mine_N = np.flatnonzero(micro.table.sequence_N == b)[: len(sequence.tokens)]
        alone = sequence_scores(
            forcing, prompt, sequence.tokens, distribution=SamplingDistribution(sequence.temperature or 0.8)
        )
        np.testing.assert_allclose(np.array(scores.logp_N)[mine_N], np.array(alone.logp_N), atol=2e-5)
        np.testing.assert_allclose(np.array(scores.entropy_N)[mine_N], np.array(alone.entropy_N), atol=2e-5)


@pytest.mark.parametrize(("temperatures", "one_number"), [((0.0, 0.0), True), ((0.7, 0.0), True), ((0.7, 0.8), False)])
def test_where_all_have_the_runs_temperature_it_is_one_number(
    temperatures: tuple[float, ...], one_number: bool
) -> None:
    """No array is made of it, whether or not the groups say so."""
    sequences = [scored_only((3,), (1, 2))._replace(temperature=t) for t in temperatures]
    (micro,) = build_micro_batches(sequences, layout="padded", budget=1000)
    assert (sampled_tokens_of(micro.table, SamplingDistribution(0.7)).temperature_N is None) is one_number
