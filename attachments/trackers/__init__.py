"""Experiment trackers: wandb, trackio and TensorBoard."""
