"""Computes the share of the gradient that rounding cuts in 16 bits although the policy has not moved.

    python -m bench rounding

Sampler and learner of a model in bfloat16 differ by the mean KL divergence of the parity table (28 layers, 1.2e-3 nats
per token). The log-ratio of a token is drawn from the normal distribution of mean -KL and variance 2 KL, independently,
and passes the loss of the learner with the default settings of each objective. Nothing depends on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from msgspec import convert

from bench.tables import markdown
from clotho.settings.learner import LearnerSection
from clotho.training.objectives.contract import ObjectiveInputs
from clotho.training.objectives.functions import objective
from clotho.training.objectives.loss import LossCoefficients, TokenLossInputs, policy_loss
from protocols.step import Cut
from training_run.profile.keys import CHOICES

NAME = "rounding"
KL, TOKENS, COMPLETIONS = 1.2e-3, 300, 4000
SEQUENCE_LEVEL = ("gspo", "gspo_token", "rloo")


class Row(NamedTuple):
    """Shares of the tokens whose gradient is cut, of completions with positive and with negative advantage."""

    name: str
    positive: float
    negative: float


def cut_shares(name: str, table: dict[str, Any]) -> Row:
    """The shares of `[learner.objective]`. Every second completion has a negative advantage."""
    settings = convert({"objective": table}, LearnerSection)
    noise = np.random.default_rng(0).normal(-KL, (2 * KL) ** 0.5, (COMPLETIONS, TOKENS))
    advantage_B = np.where(np.arange(COMPLETIONS) % 2, -1.0, 1.0)
    logp_N, ones_N = mx.full(noise.size, -0.5), mx.ones(noise.size)
    rollout_logp_N = logp_N - mx.array(noise.ravel().astype(np.float32))
    tokens = ObjectiveInputs(
        old_logp_N=rollout_logp_N,
        rollout_logp_N=rollout_logp_N,
        advantage_N=mx.array(np.repeat(advantage_B, TOKENS).astype(np.float32)),
        loss_mask_N=ones_N,
        sequence_N=mx.array(np.repeat(np.arange(COMPLETIONS), TOKENS)),
        sequences=COMPLETIONS,
        group_B=mx.arange(COMPLETIONS),
    )
    inputs = TokenLossInputs(tokens=tokens, proximal_N=None, loss_weight_N=ones_N, on_policy_mask_N=ones_N)
    *_, cut_N = policy_loss(
        logp_N,
        mx.zeros(noise.size),
        inputs,
        settings=settings,
        loss_coefficients=LossCoefficients(0.0, 0.0),
        objective=objective(settings.objective),
    )
    cut_B = (np.array(cut_N) != Cut.NONE).reshape(COMPLETIONS, TOKENS).mean(axis=-1)
    return Row(name, cut_B[advantage_B > 0].mean(), cut_B[advantage_B < 0].mean())


def has_ratio(objective: str) -> bool:
    """Whether the loss of an objective compares the policy with the sampler."""
    return convert({"objective": {"type": objective}}, LearnerSection).objective.has_ratio


def read() -> list[Row]:
    """The shares of the built-in objectives, of corrections, and of a ratio to the sampler where it is no default."""
    names = [name for name in CHOICES["learner.objective.type"] if name != "custom" and has_ratio(name)]
    corrections = [name for name in CHOICES["learner.objective.importance_correction.type"] if name != "off"]
    to_sampler = {"ratio_reference": "sampler", "importance_correction": {"type": "off"}}
    return [
        *(cut_shares(f"`{name}`", {"type": name}) for name in names),
        *(cut_shares(f"`{name}`, ratio to the sampler", {"type": name, **to_sampler}) for name in SEQUENCE_LEVEL),
        *(
            cut_shares(f"`gspo`, `{name}`", {"type": "gspo", "importance_correction": {"type": name}})
            for name in corrections
        ),
    ]


def table(rows: Sequence[Row]) -> str:
    """A row per objective."""
    cells = [[row.name, *(f"{100 * share:.2g} %" for share in row[1:])] for row in rows]
    return markdown(["objective", "positive advantage", "negative advantage"], cells)


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    sys.stdout.write(f"{table(read())}\n")
    return 0
