"""Layers as the CPU backend computes them fastest: the values are mlx-lm's up to rounding, the way to them is not.

There `mx.exp`, and with it softmax and sigmoid, takes 12 to 15 ns per number, choosing (`mx.where`) takes 4, `mx.power`
takes 4, and sums, products and matrix products take a fraction of 1. So exponentials are powers, masks are added, and
gradients are written in closed form, in as few passes as there can be. On a GPU nothing here is used.
"""
