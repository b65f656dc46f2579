"""Optimizers as functions: one rule per module, chosen from a table."""
