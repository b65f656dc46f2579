"""What the reward model adds to the library: a reward function."""

from __future__ import annotations

from collections.abc import Mapping

from clotho.extension import Extension
from clotho.rewards.registry import BuiltIn


class RewardModelExtension(Extension):
    """The reward function `reward_model`."""

    def rewards(self) -> Mapping[str, BuiltIn]:
        """Return the reward function."""
        return {
            "reward_model": BuiltIn(
                expects="what the reward model scores highly",
                load="attachments.reward_model.network:load",
                has_settings=True,
                computes=True,
            )
        }


EXTENSION = RewardModelExtension()
