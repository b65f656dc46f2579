"""Rounded lengths: few different shapes, so that buffers and compiled kernels are used again."""

from __future__ import annotations

TOKEN_BUCKET = 64
"""The completion tokens of a micro-batch are padded to a multiple of this."""


def bucket(length: int) -> int:
    """Round a length up to one of at most 16 sizes per octave: a multiple of 8, at least; padding below 1/8."""
    granularity = max(8, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // granularity) * granularity
