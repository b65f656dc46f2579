"""Fixtures of several tests of the decode engine."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["sampled by the host", "sampled on the device"])
def read_mode(request: pytest.FixtureRequest) -> None:
    """Run a test with tokens read at once, and with tokens read one step later, as on a GPU."""
    if request.param == "sampled on the device":
        request.getfixturevalue("device_sampler")
