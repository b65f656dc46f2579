"""Rewards of user code: workers, time limits, and the runner that combines functions."""
