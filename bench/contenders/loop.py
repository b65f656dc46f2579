"""The inside of a contender's process: cases come as lines of JSON on standard input, metrics leave on standard output.

Every line that comes is a case; it is prepared when it is first seen, and measured once each time. Whatever libraries
print goes to standard error.
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
Once = Callable[[], Metrics]
"""Measures a prepared case once; metrics by name."""


LAUNCHED = "CLOTHO_BENCH_LAUNCHED"
"""Variable with the time at which the process was started, seconds since 1970."""

_launched = float(os.environ.get(LAUNCHED, time.time()))
_waited = 0.0


def busy_seconds() -> float:
    """How long this process has lived, from its start, but for the time that it waited for cases."""
    return time.time() - _launched - _waited


def serve(prepare: Callable[[Case], Once], *, semantics: str, packages: Sequence[str]) -> None:
    """Answer cases until standard input ends; what a case raises is its answer, and so is a metric that is no number.

    prepare: makes ready what is not to be measured. Only the latest case is kept. semantics: what this contender's
    numbers mean, one sentence. packages: whose versions matter.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _say(answers, {"semantics": semantics, "versions": _versions(packages)})
    prepared: tuple[Case, Once] | None = None
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
