"""What agents add to the library: the reward of an environment as a reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clotho.extension import Extension
from clotho.rewards.registry import BuiltIn


def environment_reward(
    completions: Sequence[object], environment_rewards: Sequence[float | None] = ()
) -> Sequence[float | None]:
    """Return the reward that the environment of each completion gave; None where there was none."""
    return environment_rewards or [None] * len(completions)


class EnvironmentRewards(Extension):
    """The reward function `environment`."""

    def rewards(self) -> Mapping[str, BuiltIn]:
        """Return the reward of an environment."""
        return {"environment": BuiltIn(expects="what the environment gives (agent)", function=environment_reward)}


EXTENSION = EnvironmentRewards()
