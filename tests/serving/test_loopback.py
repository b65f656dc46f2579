"""Addresses of this machine and of the local network."""

from __future__ import annotations

import errno
import platform

import pytest

from clotho.serving.loopback import is_loopback, local_network_hint


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST", "Localhost"])
def test_loopback_hosts_are_recognised_in_any_case(host: str) -> None:
    """127.0.0.0/8, ::1 with or without brackets, and localhost."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "localhost.example.com", "127.0.0.1.example.com"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    """Wildcards, the empty host, other addresses and names."""
    assert not is_loopback(host)


def unreachable() -> BaseException:
    """Return an error as httpx raises it: the cause is a group of the errors of all addresses."""
    causes = [OSError(errno.EHOSTUNREACH, "No route to host"), OSError(errno.ECONNREFUSED, "refused")]
    error = RuntimeError("All connection attempts failed")
    error.__cause__ = ExceptionGroup("several addresses", causes)
    return error


@pytest.mark.parametrize("host", ["192.168.1.7", "10.0.0.2", "[fe80::1]", "studio.local", "studio"])
def test_a_mac_without_a_route_to_the_local_network_gets_the_hint_about_its_privacy(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Other systems, other errors and hosts of the internet have no such rule."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert local_network_hint(unreachable(), host) == ""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "Local Network" in local_network_hint(unreachable(), host)
    assert local_network_hint(OSError(errno.ECONNREFUSED, "refused"), host) == ""
    for other in ("127.0.0.1", "8.8.8.8", "api.example.com"):
        assert local_network_hint(unreachable(), other) == ""
