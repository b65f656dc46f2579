"""The decode engine: continuous batching over the models and caches of mlx-lm."""
