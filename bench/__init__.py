"""Measurements: one question per module, each a program that writes what it found to `bench/results/`."""

import clotho  # noqa: F401, loads a fast BLAS, which must happen before MLX is imported
