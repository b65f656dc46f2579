"""The compiled step is the step, or the run says that it is not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.training.optimizers import compiled as compiled_step
from clotho.training.optimizers.compiled import CHECKED, CompiledStep, Stepper, differences, make_stepper
from clotho.training.optimizers.state import OPTIMIZERS, initial_state, state_arrays, step
from protocols.errors import CompilationError
from tests.training.optimizers.walks import Arrays, gradients, parameters, rate, settings

ROOT = Path(__file__).parents[3]
ON_CPU = mx.default_device() == mx.Device(mx.cpu)
needs_compiler = pytest.mark.skipif(ON_CPU and shutil.which("g++") is None, reason="on the CPU MLX compiles with g++")


def small() -> Arrays:
    """An adapter's two matrices, one of them narrow: few kernels to compile."""
    return {"q.lora_a": parameters()["tall"], "q.lora_b": parameters()["wide"].astype(mx.bfloat16)}


def steps(stepper: Stepper, start: Arrays, kind: str, *, count: int = CHECKED + 2) -> list[Arrays]:
    """Parameters and state after each step; rate and gradients change."""
    at, state, seen = start, initial_state(kind, start), []
    known = {"q.lora_a": "tall", "q.lora_b": "wide"}
    for number in range(count):
        given = {name: gradients(number)[known.get(name, name)] for name in start}
        at, state = stepper(at, given, state, learning_rate=rate(number), scale=0.5)
        seen.append(at | state_arrays(state))
    return seen


def assert_compiled_equals_plain(kind: str, start: Arrays) -> None:
    """After every step, those that are no longer checked included."""
    how = settings(kind, compile=True, weight_decay=0.1, lora_plus=4.0)
    plain = steps(partial(step, settings=how), start, kind)
    for ours, theirs in zip(steps(make_stepper(how), start, kind), plain, strict=True):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            expected = np.array(array.astype(mx.float32))
            np.testing.assert_allclose(np.array(ours[name].astype(mx.float32)), expected, rtol=1e-5, atol=1e-7)


@needs_compiler
def test_compiled_equals_plain() -> None:
    """For the two matrices of an adapter; neither rate nor number of the step is frozen into the program."""
    assert_compiled_equals_plain("adamw", small())


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_every_optimizer_compiled_equals_plain(kind: str) -> None:
    """For arrays of every kind; the C++ compiler takes up to half a minute the first time."""
    assert_compiled_equals_plain(kind, parameters())


@needs_compiler
def test_the_profile_chooses() -> None:
    """`learner.compile`."""
    assert isinstance(make_stepper(settings("sgd", compile=True)), CompiledStep)
    assert not isinstance(make_stepper(settings("sgd")), CompiledStep)


def frozen_scalars(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that keeps the scalars of the first call, as for values that a function closes over."""
    first: list[mx.array] = []

    def call(*arrays: Any) -> Any:
        first.extend(arrays[4:] if not first else ())
        return function(*arrays[:4], *first)

    return call


def nearly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose steps are a thousandth too long."""

    def call(*arrays: Any) -> Any:
        constants, learning_rate, scale = arrays[4:]
        return function(*arrays[:4], constants, 1.001 * learning_rate, scale)

    return call


def forgetful(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that loses one slot of one parameter."""

    def call(*arrays: Any) -> Any:
        updated, slots, master = function(*arrays)
        slots["velocity"]["wide"] = mx.zeros_like(slots["velocity"]["wide"])
        return updated, slots, master

    return call


@pytest.mark.parametrize(
    ("compiler", "good_steps", "named"),
    [(frozen_scalars, 1, "parameter"), (nearly, 0, "parameter"), (forgetful, 0, r"velocity.wide \(1 of")],
)
def test_a_compiled_step_that_differs_ends_the_run(
    compiler: Callable[..., Any], good_steps: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the optimizer, the arrays and the remedy."""
    how = settings("sgd", compile=True)
    monkeypatch.setattr(compiled_step, "require_compiler", lambda: None)
    monkeypatch.setattr(mx, "compile", compiler)
    stepper = make_stepper(how)
    steps(stepper, parameters(), "sgd", count=good_steps)
    with pytest.raises(CompilationError, match=rf"compiled step of sgd .* {named}.*: set learner.compile = false"):
        steps(stepper, parameters(), "sgd")


def test_only_the_first_steps_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that the uncompiled step is not taken again."""
    taken = []

    def counted(*given: Any, **named: Any) -> Any:
        taken.append(given)
        return step(*given, **named)

    monkeypatch.setattr(compiled_step, "require_compiler", lambda: None)
    monkeypatch.setattr(mx, "compile", lambda function: function)
    monkeypatch.setattr(compiled_step, "step", counted)
    steps(make_stepper(settings("sgd", compile=True)), parameters(), "sgd", count=CHECKED + 2)
    assert len(taken) == CHECKED


def test_rounding_is_no_difference() -> None:
    """A movement far below a weight's spacing may be rounded either way; of 2000 signs, two may be; NaN never."""
    before = {"a": mx.ones(2000)}
    plain = {"a": before["a"] - 1e-6}
    last_place = {"a": plain["a"] + 1.2e-7 * mx.sin(mx.arange(2000))}
    assert differences(before, plain, last_place) == []
    signs = np.full(2000, 0.9, dtype=np.float32)
    for flipped, expected in ((2, []), (3, ["a"])):
        signs[:flipped] = 1.1
        assert differences(before, {"a": 0.9 * before["a"]}, {"a": mx.array(signs)}) == expected
    assert differences({"a": mx.ones(1)}, {"a": mx.ones(1)}, {"a": mx.array([float("nan")])}) == ["a"]


PROGRAM = """
import clotho
import mlx.core as mx
from clotho.training.optimizers.compiled import make_stepper
from clotho.training.optimizers.state import initial_state
from protocols.errors import ProfileError
from clotho.config.schema import LearnerSection
a = {"a": mx.ones(3)}
try:
    stepper = make_stepper(LearnerSection(compile=True, optimizer="sgd"))
    stepper(a, a, initial_state("sgd", a), learning_rate=0.1, scale=1.0)
except ProfileError as error:
    print(error, end="")
"""
BROKEN = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no space left'\nexit 1\n"


@pytest.mark.skipif(not ON_CPU, reason="on a GPU MLX compiles by itself")
@pytest.mark.parametrize(("compiler", "reason"), [("", "on the CPU it needs g++"), (BROKEN, "(no space left)")])
def test_without_a_working_compiler_the_profile_is_refused(compiler: str, reason: str, tmp_path: Path) -> None:
    """In one line that says what to do; MLX itself says nothing, and does not compile."""
    (tmp_path / "bin").mkdir()
    if compiler:
        (tmp_path / "bin" / "g++").write_text(compiler)
        (tmp_path / "bin" / "g++").chmod(0o755)
    environment = {"PATH": str(tmp_path / "bin"), "TMPDIR": str(tmp_path)}
    program = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert reason in said
    assert said.endswith("set learner.compile = false")
    assert "\n" not in said
