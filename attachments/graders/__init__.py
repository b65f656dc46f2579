"""Graders: comparisons of an answer with its reference, math-verify, and a model as judge."""
