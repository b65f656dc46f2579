"""Tinker's API: clients of its SDK train and sample adapters of the served base model."""
