"""Replay of routes: the experts that the sampler has chosen compute the learner's passes."""
