"""Preferences: pairs of a dataset, or completions with a label, in the place of completions of the policy."""
