"""Advice on errors of connections to the local network."""

from __future__ import annotations

import errno
import platform

import pytest

from training_run.local_network import local_network_hint


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
