"""Evaluation of held-out problems."""
