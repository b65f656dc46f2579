"""The task of the profile `proof-reverse-text`: texts that are written backwards, and the reward of prime-rl."""
