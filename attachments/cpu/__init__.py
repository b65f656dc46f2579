"""The CPU backend: NumPy decoding, and layers with closed-form gradients.

MLX's own CPU kernels are slow for parts of a transformer: `mx.exp`, and with it softmax and sigmoid, takes 12 to 15 ns
per element, `mx.where` and `mx.power` take 4, while sums and matrix products take a fraction of 1. This package decodes
Llama, Qwen2, Qwen3 and Qwen3.5 in NumPy, and replaces the layers of training by equivalent ones with fewer passes over
the data. The results equal those of mlx-lm up to rounding. Nothing here is used on a GPU.
"""
