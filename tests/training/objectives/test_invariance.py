"""The loss of every objective is invariant to padding, order and the split into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from clotho.training.objectives.contract import ObjectiveInputs
from clotho.training.objectives.functions import objective
from clotho.training.objectives.loss import TokenLossInputs, initial_loss_coefficients, loss_weights, policy_loss
from tests.learner_settings import OF_TOKENS, learner_settings, short_names
from tests.training.objectives.objective_inputs import float_array

LENGTHS = [[3, 5], [1, 4, 2], [6, 3]]
COMPLETIONS = [length for lengths_G in LENGTHS for length in lengths_G]
SPLITS = [[[0, 1, 2, 3, 4, 5, 6]], [[0, 1], [2, 3, 4], [5, 6]], [[6, 0], [3, 1, 5, 2], [4]]]


class Batch:
    """Tokens of seven completions of three groups, in any assignment to micro-batches."""

    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(5)
        N = sum(COMPLETIONS)
        keys = {"entropy_weight": 0.01, "kl_beta": 0.1, "outlier_high": 1.6, "off_policy_mask": 0.1}
        self.settings = learner_settings(objective=name, **keys)
        self.objective = objective(self.settings.objective)
        self.sequence_N = np.repeat(np.arange(7), COMPLETIONS)
        self.logp_N = -np.abs(rng.normal(size=N)) - 0.3
        self.rollout_logp_N = self.logp_N + 0.3 * rng.normal(size=N)
        self.proximal_N = self.logp_N + 0.1 * rng.normal(size=N)
        self.reference_N = self.logp_N + 0.3 * rng.normal(size=N)
        self.entropy_N = rng.uniform(0.5, 2.0, N)
        self.advantage_N = rng.normal(size=7)[self.sequence_N]
        shares = np.concatenate(loss_weights(self.settings.objective.loss_aggregation, LENGTHS, max_tokens=8))
        self.loss_weight_N = shares[self.sequence_N]

    def loss_of_micro_batch(
        self, completions: Sequence[int], padding: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the sums and the gradient of every token of a micro-batch of these completions."""
        at_M = np.concatenate([np.flatnonzero(self.sequence_N == i) for i in completions])
        at_N = np.concatenate([at_M, np.full(padding, at_M[0])])
        live_N = np.arange(len(at_N)) < len(at_M)
        place = {completion: place for place, completion in enumerate(completions)}
        tokens = ObjectiveInputs(
            old_logp_N=float_array(self.rollout_logp_N[at_N]),
            rollout_logp_N=float_array(self.rollout_logp_N[at_N]),
            advantage_N=float_array(self.advantage_N[at_N]),
            loss_mask_N=float_array(live_N),
            sequence_N=mx.array([place[i] for i in self.sequence_N[at_N]]),
            sequences=len(completions),
            group_B=mx.arange(len(completions)),
            reference_logp_N=float_array(self.reference_N[at_N]),
        )
        has_proximal = short_names(self.settings).ratio_reference == "batch_start"
        inputs = TokenLossInputs(
            tokens=tokens,
            proximal_N=float_array(self.proximal_N[at_N]) if has_proximal else None,
            loss_weight_N=float_array(self.loss_weight_N[at_N] * live_N),
            on_policy_mask_N=float_array(at_N % 2),
        )
        loss_coefficients = initial_loss_coefficients(self.settings)
        (loss, metrics, _), gradient_N = mx.value_and_grad(
            lambda logp_N: policy_loss(
                logp_N,
                float_array(self.entropy_N[at_N]),
                inputs,
                settings=self.settings,
                loss_coefficients=loss_coefficients,
                objective=self.objective,
            )
        )(float_array(self.logp_N[at_N]))
        whole_N = np.zeros(len(self.logp_N))
        np.add.at(whole_N, at_N, np.array(gradient_N, dtype=np.float64))
        self.names = ["loss", *metrics]
        return np.array([loss.item(), *(sums[0].item() for sums in metrics.values())]), whole_N


@pytest.mark.parametrize("name", OF_TOKENS)
def test_any_split_and_padding_give_the_same_sums_and_gradients(name: str) -> None:
    """One micro-batch, one per group, and completions assigned at random in a random order."""
    batch = Batch(name)
    whole, whole_N = batch.loss_of_micro_batch(range(7), padding=0)
    for padding, split in enumerate(SPLITS, start=1):
        parts = [batch.loss_of_micro_batch(completions, padding) for completions in split]
        np.testing.assert_allclose(np.sum([sums for sums, _ in parts], axis=0), whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.sum([part_N for _, part_N in parts], axis=0), whole_N, rtol=1e-5, atol=1e-7)
    rejected = whole[batch.names.index("rejected_fraction")]
    assert (0 < rejected < len(batch.logp_N)) == (name != "sft"), "without a sampler, ratios are 1"
