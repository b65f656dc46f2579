"""What Reasoning Gym adds to the library: the reward of its problems."""

from __future__ import annotations

from clotho.rewards.registry import BuiltIn

LOAD = "attachments.reasoning_gym.reward:load"
REWARDS = {"reasoning_gym": BuiltIn(expects="the answer to the question {place}", load=LOAD)}
