"""A reward model as a network: a sequence classifier of the hub scores conversations between decode steps."""

NAME = "reward_model"
"""Name of the reward function."""
