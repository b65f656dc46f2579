"""Advice on errors of connections to the local network."""

from __future__ import annotations

import errno
import ipaddress
import platform


def local_network_hint(error: BaseException, host: str) -> str:
    """Return what to do about an error of a connection to a host, for the end of its message; empty if it is not known.

    macOS 15 and newer refuse the local network to programs that the user has not allowed it, with `No route to host`.
    Names without a dot, and of Bonjour, are of the local network.
    """
    if platform.system() != "Darwin" or not _is_local(host) or not _is_unreachable(error):
        return ""
    return (
        "; if ping reaches it, allow the program that has started this one under System Settings, Privacy & Security, "
        "Local Network"
    )


def _is_local(host: str) -> bool:
    name = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.lower().removesuffix(".").endswith(".local")
    return address.is_private and not address.is_loopback


def _is_unreachable(error: BaseException) -> bool:
    """Whether an error, one of a group, or what has caused them, says that there is no route."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    cause = error.__cause__ or error.__context__
    return (
        (isinstance(error, OSError) and error.errno == errno.EHOSTUNREACH)
        or any(_is_unreachable(part) for part in parts)
        or (cause is not None and _is_unreachable(cause))
    )
