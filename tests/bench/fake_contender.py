"""A contender that counts its runs and misbehaves as the case says.

case: then: how to misbehave; from_run: from which run on; who: the only contender that misbehaves.

Run with `-m`, as every contender.
"""

from __future__ import annotations

import os
import signal
import sys

from bench.contenders.worker import Case, MeasureOnce, Metrics, serve

NAME = os.environ.get("FAKE", "")


def prepare(case: Case) -> MeasureOnce:
    """Count from the start."""
    asked = 0

    def once() -> Metrics:
        nonlocal asked
        asked += 1
        if asked >= case.get("from_run", 1) and case.get("who", NAME) == NAME:
            misbehave(case.get("then", ""))
        return {"runs": asked, "cost": float("nan") if case.get("then") == "nan" else 10.0 * asked}

    return once


def misbehave(how: str) -> None:
    """Fail or print in one of the ways of libraries."""
    match how:
        case "raise":
            raise ValueError("no such shape")
        case "die":
            os._exit(3)
        case "hang":
            signal.pause()
        case "print":
            sys.stdout.write("a library is chatty\n")
            os.write(1, b"and so is its native half\n")


if __name__ == "__main__":
    if NAME == "dies at once":
        sys.exit(4)
    serve(prepare, semantics=f"Counts as {NAME}.", packages=["msgspec", "no-such-package"])
