"""The optimizer's step as the profile wants it: plain, or compiled and, at first, checked against the plain one."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import mlx.core as mx
import numpy as np

from clotho.config.schema import LearnerSection
from clotho.training.optimizers.rule import Arrays
from clotho.training.optimizers.state import Advance, OptimizerState, advance, state_arrays, step, step_by
from protocols.errors import CompilationError, ProfileError

CHECKED = 4
"""Compiled steps that are also taken uncompiled: a rehearsed one, the first, the first with a state, and one more."""

TOLERANCE = 1e-4
"""Relative difference between the two at which one of them is wrong."""


class Stepper(Protocol):
    """Takes an optimizer's steps; `table.step` with its settings bound."""

    def __call__(
        self, parameters: Arrays, gradients: Arrays, state: OptimizerState, *, learning_rate: float, scale: float
    ) -> tuple[Arrays, OptimizerState]:
        """Return new parameters and the new state."""


def make_stepper(settings: LearnerSection) -> Stepper:
    """The stepper for `settings.optimizer`, compiled if `settings.compile`.

    Raises ProfileError where MLX cannot compile; a compiled one may also do so in its first step.
    """
    return CompiledStep(settings) if settings.compile else partial(step, settings=settings)


class CompiledStep:
    """An optimizer's step as one compiled function of parameters, gradients, state and scalars.

    Its first `CHECKED` steps are evaluated, and taken uncompiled beside; CompilationError where the two differ.
    """

    def __init__(self, settings: LearnerSection) -> None:
        """Raises ProfileError where MLX cannot compile."""
        require_compiler()
        self._settings = settings
        self._advance: Advance = mx.compile(partial(advance, settings=settings))
        self._unchecked = CHECKED

    def __call__(
        self, parameters: Arrays, gradients: Arrays, state: OptimizerState, *, learning_rate: float, scale: float
    ) -> tuple[Arrays, OptimizerState]:
        """Return new parameters and the new state. Raises CompilationError."""
        updated, after = step_by(
            self._advance,
            parameters,
            gradients,
            state,
            learning_rate=learning_rate,
            scale=scale,
            settings=self._settings,
        )
        if self._unchecked:
            compiled = _named(updated, after)
            _evaluate(compiled)
            plain = step(
                parameters, gradients, state, learning_rate=learning_rate, scale=scale, settings=self._settings
            )
            wrong = differences(_named(parameters, state), _named(*plain), compiled)
            if wrong:
                raise CompilationError(
                    f"the compiled step of {self._settings.optimizer} differs from the uncompiled one in "
                    f"{', '.join(wrong[:3])} ({len(wrong)} of {len(compiled)} arrays): set learner.compile = false"
                )
            self._unchecked -= 1
        return updated, after


def require_compiler() -> None:
    """Refuse, with ProfileError, where `mx.compile` would quietly give back the function it was given."""
    traces = []

    def probe(x: mx.array) -> mx.array:
        traces.append(x)
        return x + x

    compiled = mx.compile(probe)
    for _ in range(2):
        compiled(mx.array(1.0))
    if len(traces) > 1:
        raise ProfileError(
            "learner.compile = true: MLX does not compile here (on the CPU it needs g++, and MLX_DISABLE_COMPILE must "
            "not be set); set learner.compile = false"
        )


def differences(before: Arrays, plain: Arrays, compiled: Arrays) -> list[str]:
    """Names of the arrays in which two outcomes of one step differ by more than rounding explains.

    Elements are compared by how far they moved: within `TOLERANCE` of that and of its mean over the array, and four
    units in the last place of the result. One element in a thousand may be beyond: lion moves by a sign, and rounding
    decides some where it is near zero. What is not finite differs.
    """
    counts = mx.stack([_beyond(before[name], plain[name], compiled[name]) for name in plain])
    return [
        name for (name, array), count in zip(plain.items(), np.array(counts), strict=True) if count > array.size // 1000
    ]


def _beyond(before: mx.array, plain: mx.array, compiled: mx.array) -> mx.array:
    """How many elements differ."""
    rounding = 4.0 * float(mx.finfo(plain.dtype).eps)
    before, plain, compiled = (array.astype(mx.float32) for array in (before, plain, compiled))
    moved = mx.abs(plain - before)
    allowed = TOLERANCE * (moved + mx.mean(moved)) + rounding * mx.abs(plain)
    return mx.sum(mx.logical_not(mx.abs(compiled - plain) <= allowed))


def _named(parameters: Arrays, state: OptimizerState) -> Arrays:
    arrays = {f"parameter.{name}": array for name, array in parameters.items()} | state_arrays(state)
    del arrays["step"]
    return arrays


def _evaluate(compiled: Arrays) -> None:
    try:
        mx.eval(compiled)
    except RuntimeError as error:
        if not str(error).startswith("[Compile"):
            raise
        output = " ".join(str(error).rpartition("the output is: ")[2].split())
        raise ProfileError(
            f"learner.compile = true: the C++ compiler failed ({output[:200]}); "
            "repair it or set learner.compile = false"
        ) from error
