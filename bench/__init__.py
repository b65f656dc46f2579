"""Measurements: one question per module, each a program that writes what it found to `bench/results/`."""

from clotho.process import load_blas

load_blas()  # before the first import of MLX
