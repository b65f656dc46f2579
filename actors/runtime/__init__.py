"""What every actor stands on. Knows nothing of reinforcement learning."""
