"""Fixtures of several tests of the decode engine."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["sampled by the host", "sampled on the device"])
def read_mode(request: pytest.FixtureRequest) -> None:
    """Run a test with tokens read at once, and with tokens read one step later, as on a GPU."""
    if request.param == "sampled on the device":
        request.getfixturevalue("device_sampler")


@pytest.fixture(params=["host", "MLX, sampled on the device"])
def path(request: pytest.FixtureRequest) -> None:
    """Decode on the host and as on a GPU."""
    if request.param != "host":
        request.getfixturevalue("mlx_decoder")
    if request.param == "MLX, sampled on the device":
        request.getfixturevalue("device_sampler")
