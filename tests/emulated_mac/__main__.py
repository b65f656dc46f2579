"""Runs pytest on an emulated Mac: `python -m tests.emulated_mac [options of pytest] [tests]`; by default `TESTS`.

Every Python process, those that tests start included, begins with `python/sitecustomize.py`. Commands of macOS
(`programs/`) print what a Mac with an M3, macOS 26.1, mains power and a sleeping display prints. MLX computes on the
CPU, and says that it computes on Metal. What no emulation shows: kernels of Metal, kqueue, APFS and the XNU kernel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PLACE = Path(__file__).parent
ROOT = PLACE.parents[1]

TESTS = (
    "tests/emulated_mac",
    "tests/e2e/test_run.py",
    "tests/e2e/test_serve.py",
    "tests/e2e/test_signals.py",
    "tests/e2e/test_kill.py",
    "attachments/doctor/tests/test_doctor.py",
    "attachments/machine/tests",
)
"""The main job, the server, signals, resumption after a kill, `doctor`, and the checks of the machine."""


def main() -> None:
    """Replace this process by pytest."""
    path = [str(PLACE / "python"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": os.pathsep.join([str(PLACE / "programs"), os.environ.get("PATH", os.defpath)]),
    }
    os.chdir(ROOT)
    names_tests = any(Path(argument.partition("::")[0]).exists() for argument in sys.argv[1:])
    tests = () if names_tests else TESTS
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:], *tests], environment)


if __name__ == "__main__":
    main()
