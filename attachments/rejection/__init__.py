"""Rejection sampling: the best completions of a policy as demonstrations."""
