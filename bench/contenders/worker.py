"""The process of a contender: cases arrive as JSON lines on standard input, metrics leave on standard output.

Every input line is a case. A case is prepared when it first arrives and measured once per line. Output of libraries
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Case = dict[str, Any]
Metrics = dict[str, float]
MeasureOnce = Callable[[], Metrics]
"""Measures a prepared case once and returns metrics by name."""


LAUNCHED = "CLOTHO_BENCH_LAUNCHED"
"""Environment variable with the start time of the process, in seconds since 1970."""

_launched = float(os.environ.get(LAUNCHED, time.time()))
_waited = 0.0


def busy_seconds() -> float:
    """Seconds since the process started, without the time spent waiting for cases."""
    return time.time() - _launched - _waited


def serve(prepare: Callable[[Case], MeasureOnce], *, semantics: str, packages: Sequence[str]) -> None:
    """Answer cases until standard input ends. Exceptions and non-finite metrics are reported as errors of the case.

    prepare: does the work that is not measured; only the latest case is kept. semantics: what the numbers mean, in one
    sentence. packages: whose versions are reported.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _say(answers, {"semantics": semantics, "versions": _versions(packages)})
    prepared: tuple[Case, MeasureOnce] | None = None
    for line in _lines():
        case = json.loads(line)
        try:
            if prepared is None or prepared[0] != case:
                prepared = None
                prepared = case, prepare(case)
            _say(answers, {"metrics": prepared[1]()})
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def _lines() -> Iterator[str]:
    global _waited
    while True:
        began = time.time()
        line = sys.stdin.readline()
        _waited += time.time() - began
        if not line:
            return
        yield line


def _say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer, allow_nan=False) + "\n")
    answers.flush()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
