"""PPO with a critic: advantages per token from a value head that learns what completions will earn."""
