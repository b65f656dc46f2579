"""Addresses of this machine."""

from __future__ import annotations

import pytest

from clotho.settings.server import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST", "Localhost"])
def test_loopback_hosts_are_recognised_in_any_case(host: str) -> None:
    """127.0.0.0/8, ::1 with or without brackets, and localhost."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "localhost.example.com", "127.0.0.1.example.com"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    """Wildcards, the empty host, other addresses and names."""
    assert not is_loopback(host)
