"""What a choice brings along: settings of the paper that an objective or a correction comes from.

A recipe ranks just below the layer that makes the choice: what that layer, or a higher one, says itself wins. Sources
of the numbers are in the docstrings of the functions in `clotho.training.objectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Recipe = Mapping[str, Any]

OBJECTIVES: Mapping[str, Recipe] = MappingProxyType(
    {
        "grpo": {"advantage": "group", "loss_aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2},
        "dr_grpo": {"advantage": "mean", "loss_aggregation": "token_sum", "clip_low": 0.2, "clip_high": 0.2},
        "bnpo": {"advantage": "group", "loss_aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.2},
        "dapo": {
            "advantage": "group",
            "loss_aggregation": "token_mean",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dynamic_sampling": True,
        },
        "gspo": {"advantage": "group", "loss_aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
        "gspo_token": {"advantage": "group", "loss_aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
        "cispo": {"advantage": "group", "loss_aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
        "rloo": {"advantage": "leave_one_out", "loss_aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2},
        "reinforce": {
            "advantage": "mean",
            "loss_aggregation": "token_mean",
            "ratio_reference": "batch_start",
            "correction": "truncate",
        },
        "reinforce_plus_plus": {
            "advantage": "batch_centred",
            "loss_aggregation": "token_mean",
            "clip_low": 0.2,
            "clip_high": 0.2,
        },
        "ppo_decoupled": {
            "advantage": "group",
            "loss_aggregation": "token_mean",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "ratio_reference": "batch_start",
            "correction": "mask",
            "correction_low": 0.0,
            "correction_high": 5.0,
        },
        "dppo_tv": {
            "advantage": "mean",
            "loss_aggregation": "token_mean",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "quadratic_kl": 1e-3,
        },
        "sapo": {
            "advantage": "group",
            "loss_aggregation": "sequence_mean",
            "sapo_tau_pos": 1.0,
            "sapo_tau_neg": 1.05,
        },
    }
)
"""By name of the objective: settings of `[learner]`."""

CORRECTIONS: Mapping[str, Recipe] = MappingProxyType(
    {
        "none": {},
        "truncate": {"correction_low": 0.0, "correction_high": 2.0},
        "mask": {"correction_low": 0.5, "correction_high": 5.0},
        "truncate_sequence": {"correction_low": 0.0, "correction_high": 2.0},
        "reject_sequence": {"correction_low": 0.0, "correction_high": 2.0},
        "reject_geometric": {"correction_low": 0.99, "correction_high": 1.01},
    }
)
"""By kind of correction: settings of `[learner]`."""

CLIPPED = frozenset({"clip_low", "clip_high", "dual_clip"})
SHAPES = CLIPPED | {"quadratic_kl", "sapo_tau_pos", "sapo_tau_neg"}
"""Settings of `[learner]` that only some objectives read; a `module:function` may read them all."""

USES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "grpo": CLIPPED,
        "dr_grpo": CLIPPED,
        "bnpo": CLIPPED,
        "dapo": CLIPPED,
        "gspo": CLIPPED,
        "gspo_token": CLIPPED,
        "cispo": frozenset({"clip_low", "clip_high"}),
        "rloo": CLIPPED,
        "reinforce": frozenset(),
        "reinforce_plus_plus": CLIPPED,
        "ppo_decoupled": CLIPPED,
        "dppo_tv": frozenset({"clip_low", "clip_high", "quadratic_kl"}),
        "sapo": frozenset({"sapo_tau_pos", "sapo_tau_neg"}),
    }
)
"""By name of the objective: those of `SHAPES` that it reads."""

REQUIRES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"dppo_tv": MappingProxyType({"ratio_reference": "sampler"})}
)
"""By name of the objective: settings of `[learner]` without which it is not itself.

dppo_tv measures how far the policy is from the sampler, whatever the anchor: a correction would count that twice.
"""


def recommended(objective: str, **explicit: Any) -> dict[str, Any]:
    """Arguments of a LearnerSection for an objective: its recipe, its correction's, and over both `explicit`."""
    recipe = dict(OBJECTIVES.get(objective, {}))
    if "correction" in explicit:
        recipe |= CORRECTIONS[explicit["correction"]]
    chosen = {**recipe, **explicit}
    return {**CORRECTIONS[chosen.get("correction", "none")], **chosen, "objective": objective}
