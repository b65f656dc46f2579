"""Turns every Python process that finds this module on its path into one of an emulated Mac. Imported by `site`.

Names that macOS lacks are removed from modules of the standard library before others use them, and the system is
reported as Darwin. `/proc`, `/sys` and limits of memory do not exist for the project; psutil still reads them, because
its macOS half is not part of its Linux package.
"""

# ruff: noqa: E402

from __future__ import annotations

import select

for epoll in [name for name in dir(select) if name.lower().startswith("epoll")]:
    delattr(select, epoll)  # before `socket` is imported, whose selectors would use it

import builtins
import ctypes
import errno
import fcntl
import importlib.machinery
import importlib.util
import io
import os
import platform
import resource
import signal
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

GIB = 2**30
INSTALLED, RECOMMENDED = 16 * GIB, 11_453_251_584
"""Memory of a Mac with 16 GB, and what Metal recommends as the largest working set of it."""

DEVICE: dict[str, str | int] = {
    "device_name": "Apple M3",
    "architecture": "applegpu_g15g",
    "memory_size": INSTALLED,
    "max_recommended_working_set_size": RECOMMENDED,
    "max_buffer_length": 9_163_833_344,
    "resource_limit": 499_000,
}
"""`mx.device_info(mx.gpu)` of an M3."""

MISSING: dict[ModuleType, tuple[str, ...]] = {
    os: (
        "sched_getaffinity", "sched_setaffinity", "pidfd_open", "waitid", "pipe2", "memfd_create", "eventfd",
        "eventfd_read", "eventfd_write", "posix_fadvise", "posix_fallocate", "copy_file_range", "splice", "getrandom",
        "getxattr", "setxattr", "listxattr", "removexattr", "setresuid", "setresgid", "getresuid", "getresgid",
        "O_DIRECT", "O_TMPFILE", "O_PATH", "unshare", "setns",
    ),
    signal: (
        "pidfd_send_signal", "sigwaitinfo", "sigtimedwait", "SIGPWR", "SIGPOLL", "SIGSTKFLT", "SIGRTMIN", "SIGRTMAX",
    ),
    socket: ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "SO_PEERCRED", "TCP_USER_TIMEOUT", "TCP_QUICKACK"),
    resource: (
        "prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_RTTIME", "RLIMIT_SIGPENDING",
        "RUSAGE_THREAD",
    ),
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS", "F_GET_SEALS", "F_OFD_SETLK", "F_OFD_SETLKW", "F_OFD_GETLK"),
}  # fmt: skip
"""Names that Python has on Linux and not on macOS."""

F_FULLFSYNC = 51
HIDDEN = ("/proc/", "/sys/")
READERS = ("psutil", "ctypes", "multiprocessing", "importlib", "site")
"""Packages that may read what is hidden."""


def remove_names() -> None:
    """Remove what macOS lacks."""
    for module, names in MISSING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


def full_fsync() -> None:
    """Give `fcntl` the flush of the drive's cache."""
    usual = fcntl.fcntl

    def called(descriptor: Any, command: int, argument: Any = 0) -> Any:
        if command != F_FULLFSYNC:
            return usual(descriptor, command, argument)
        os.fsync(descriptor)
        return 0

    vars(fcntl).update(F_FULLFSYNC=F_FULLFSYNC, fcntl=called)


def no_memory_limits() -> None:
    """Refuse limits of memory, as XNU does for a process that maps more already."""
    usual = resource.setrlimit

    def called(which: int, limits: tuple[int, int]) -> None:
        if which in (resource.RLIMIT_AS, resource.RLIMIT_DATA) and limits[0] != resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        usual(which, limits)

    resource.setrlimit = called


def hide_kernel_files() -> None:
    """Let `/proc` and `/sys` not exist for the project."""

    def hiding(usual: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(HIDDEN) and not _may_read():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
            return usual(path, *args, **options)

        return called

    builtins.open = io.open = hiding(open)
    os.stat, os.listdir, os.readlink = hiding(os.stat), hiding(os.listdir), hiding(os.readlink)


def _may_read() -> bool:
    """Whether a package of `READERS` is among the nearest callers."""
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_globals.get("__name__", "").partition(".")[0] in READERS:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def kernel_pressure() -> None:
    """Let `sysctlbyname` know the memory pressure: 1, which is normal."""
    usual = ctypes.CDLL.__getattr__

    def sysctlbyname(name: bytes, value: Any, *_: Any) -> int:
        if name != b"kern.memorystatus_vm_pressure_level":
            return -1
        value._obj.value = 1
        return 0

    def attribute(library: ctypes.CDLL, name: str) -> Any:
        return sysctlbyname if name == "sysctlbyname" else usual(library, name)

    ctypes.CDLL.__getattr__ = attribute  # type: ignore[method-assign]


def report_darwin() -> None:
    """Say that the system is macOS 26.1 on Apple silicon."""
    uname = platform.uname_result("Darwin", "mac.local", "25.1.0", "Darwin Kernel Version 25.1.0", "arm64")
    sys.platform = "darwin"
    platform.uname = lambda: uname
    platform.processor = lambda: "arm"
    platform.mac_ver = lambda *_, **__: ("26.1", ("", "", ""), "arm64")


class _Metal(importlib.machinery.ExtensionFileLoader):
    """Loads `mlx.core`, which then says that it computes on Metal."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and replace what it says about its device."""
        super().exec_module(module)
        core: Any = module
        usual = core.device_info
        core.default_device = lambda: core.Device(core.gpu)
        core.device_info = lambda device=core.gpu: dict(DEVICE) if device == core.Device(core.gpu) else usual(device)
        core.metal.is_available = lambda: True
        core.fast.metal_kernel = lambda name, **_: KERNELS[name](core)
        for streams in ("new_stream", "new_thread_local_stream", "default_stream"):
            setattr(core, streams, _on_cpu(core, getattr(core, streams)))


def _on_cpu(core: Any, usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of MLX that takes a device, and uses the CPU."""
    return lambda device, *rest: usual(core.Device(core.cpu), *rest)


def norm_rotation(core: Any) -> Callable[..., Any]:
    """Compute the kernel `clotho_norm_rotation` by operations of MLX."""

    def launched(*, inputs: Any, output_shapes: Any, **_: Any) -> list[Any]:
        q, k, q_weight, k_weight, offset, settings = inputs
        q_eps, k_eps, log_base, scale = settings.tolist()
        return [
            core.fast.rope(
                core.fast.rms_norm(x.reshape(shape), weight, eps),
                shape[-1],
                traditional=False,
                base=2.0**log_base,
                scale=scale,
                offset=offset,
            )
            for x, weight, eps, shape in (
                (q, q_weight, q_eps, output_shapes[0]),
                (k, k_weight, k_eps, output_shapes[1]),
            )
        ]

    return launched


def add_norm(core: Any) -> Callable[..., Any]:
    """Compute the kernel `clotho_add_norm` by operations of MLX."""

    def launched(*, inputs: Any, **_: Any) -> list[Any]:
        x, r, weight, eps = inputs
        return [x + r, core.fast.rms_norm(x + r, weight, eps.item())]

    return launched


KERNELS = {"clotho_norm_rotation": norm_rotation, "clotho_add_norm": add_norm}
"""What stands for each kernel of Metal."""


OTHER_HALVES = {"truststore._macos": "_openssl.py"}
"""Modules that call libraries of macOS, with the file of the Linux module that has the same functions."""


class _Finder:
    """Finds `mlx.core`, and loads a fast BLAS before it, in the place of Accelerate; and `OTHER_HALVES`."""

    @staticmethod
    def find_spec(name: str, path: Any, target: ModuleType | None = None) -> Any:
        """Return the module with another loader; None for all other modules."""
        if name in OTHER_HALVES:
            return importlib.util.spec_from_file_location(name, os.path.join(next(iter(path)), OTHER_HALVES[name]))
        if name != "mlx.core":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Metal(name, spec.origin)
            for library in sorted(os.listdir(os.path.join(sys.prefix, "lib"))):
                if library.startswith("libmkl_rt.so"):
                    ctypes.CDLL(os.path.join(sys.prefix, "lib", library), mode=ctypes.RTLD_GLOBAL)
        return spec


remove_names()  # before modules that look for them at their import

import asyncio  # noqa: F401
import multiprocessing  # noqa: F401
import subprocess  # noqa: F401
import sysconfig
import urllib.request  # noqa: F401  # its macOS half is in the Python of macOS only

import psutil  # noqa: F401

sysconfig.get_config_vars()  # read from a file that is named after the system
full_fsync()
no_memory_limits()
hide_kernel_files()
kernel_pressure()
report_darwin()
sys.meta_path.insert(0, _Finder)
