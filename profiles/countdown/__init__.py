"""The task of the profile `proof-countdown`: reach a number with three others, and the reward of TinyZero."""
