"""Kernels for Metal: one kernel in the place of several small operations of a decode step.

Every kernel computes what operations of MLX compute, and is compared with them on the machine before it is used.
"""
