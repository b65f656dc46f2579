"""Decoding without a graph, for the CPU backend and plain transformers.

A step of a small batch is hundreds of operations on a few thousand numbers each, and recording, scheduling and starting
them takes MLX longer than computing them. So there a step is NumPy and BLAS, over the very buffers that MLX holds:
weights are seen, not copied. Prompts are still computed by mlx-lm's model, and so are steps of every other
architecture, and all steps on a GPU. `python -m bench decode` measures it.
"""
