"""What the reward model adds to the library: a reward function."""

from __future__ import annotations

from clotho.rewards.registry import BuiltIn

REWARDS = {
    "reward_model": BuiltIn(
        expects="what the reward model scores highly",
        load="attachments.reward_model.network:load",
        has_settings=True,
        computes=True,
    )
}
