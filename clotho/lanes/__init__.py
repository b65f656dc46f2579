"""Lanes of computation: threads with a stream of MLX each, their arbiter, and access from the event loop."""
