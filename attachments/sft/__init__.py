"""Supervised fine-tuning: demonstrations of a dataset in the place of completions of the policy."""
