"""Decoding without a graph, for the CPU backend and plain transformers.

A step of a small batch is hundreds of operations on a few thousand numbers each. MLX takes some 5 us to record,
schedule and start one of them, and 5 to 12 ns for an exponential; NumPy takes 1 us and 0.4 ns. So there a step is NumPy
and BLAS, over the very buffers that MLX holds: weights are seen, not copied. Prompts are still computed by mlx-lm's
model, and so are steps of every other architecture, and all steps on a GPU.
"""
