"""Graders with a dependency: a model as judge, and math-verify."""
