"""What learning keeps of the trained weights: themselves, their gradient, the optimizer's state, and older versions."""

from __future__ import annotations

from typing import NamedTuple

import mlx.nn as nn

from clotho.config.schema import Profile
from clotho.memory.micro_batch import most_groups
from clotho.models.lora import install_adapter, open_all_weights
from clotho.models.parameters import flat
from clotho.training.optimizers.state import state_bytes

FLOAT32 = 4


class LearningBytes(NamedTuple):
    """Bytes of arrays. trained: what learns; in_full: the part of it that belongs to the base, not to an adapter.

    gradient: of all that learns, once. optimizer: its state. reference, rollback: older versions. midway: weights and
    state between the optimizer steps of one update. update: the gradient of an optimizer step, what the step makes
    beside what there was, and what it works with.
    """

    trained: int
    in_full: int
    gradient: int
    optimizer: int
    reference: int
    rollback: int
    midway: int
    update: int


def learning_bytes(base: nn.Module, profile: Profile) -> LearningBytes:
    """Make the policy's weights trainable in `base`, and count; nothing is evaluated."""
    learner, full = profile.learner, profile.policy.kind == "full"
    if full:
        open_all_weights(base)
        beside: set[str] = set()
    else:
        config, _ = install_adapter(base, profile.policy, seed=profile.seed)
        beside = set(config.trained_weights)
    arrays = flat(base.trainable_parameters())
    trained = sum(array.nbytes for array in arrays.values())
    in_full = trained if full else sum(array.nbytes for name, array in arrays.items() if name in beside)
    float32 = FLOAT32 * sum(array.size for array in arrays.values())
    optimizer = state_bytes(learner.optimizer, arrays)
    average = float32 if learner.kl_beta > 0 and learner.reference == "average" else 0
    snapshot = trained if learner.kl_beta > 0 and learner.reference == "snapshot" else 0
    taken_anew = snapshot if learner.reference_interval else 0
    initial = in_full if learner.kl_beta > 0 and learner.reference == "base" else 0
    largest = FLOAT32 * max((array.size for array in arrays.values()), default=0)
    several = learner.update_epochs * min(learner.mini_batches, most_groups(profile)) > 1
    return LearningBytes(
        trained=trained,
        in_full=in_full,
        gradient=float32,
        optimizer=optimizer,
        reference=average + snapshot + initial,
        rollback=2 * (trained + optimizer + average + taken_anew) if profile.alarms.on_collapse == "rollback" else 0,
        midway=trained + optimizer if several else 0,
        update=float32 + trained + optimizer + average + largest,
    )
