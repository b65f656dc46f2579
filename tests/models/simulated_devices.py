"""Devices that MLX does not have here, simulated by what MLX reports about them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

MAC_16_GB = {
    "device_name": "Apple M3",
    "architecture": "applegpu_g15g",
    "memory_size": 16 * 2**30,
    "max_recommended_working_set_size": 11_453_251_584,
    "max_buffer_length": 8_589_934_592,
}
"""The values of a Mac with 16 GB. The recommended working-set size is two thirds of the memory, 10.7 GiB."""


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, info: dict[str, Any]) -> None:
    """Let MLX report a GPU as its default device. Arrays stay on the CPU."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda device=None: info)
