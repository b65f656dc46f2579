"""The baseline of least variance of VCPO (arXiv:2602.17616), an advantage for stale rollouts."""
