"""The commands besides a training run: serving, evaluation, and the work on adapters, models and profiles."""
