"""What every optimizer rule is: a module with three functions, for its state, for a step, and for one parameter."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from clotho.config.schema import LearnerSection

Arrays = dict[str, mx.array]


class Rule(Protocol):
    """How one parameter learns from its gradient. Pure functions of float32 arrays; nothing that is given changes."""

    def slots(self, parameter: mx.array) -> Arrays:
        """State of one parameter before its first step: by name, float32, lazy."""

    def constants(self, t: int, settings: LearnerSection) -> dict[str, float]:
        """Numbers of step `t` (1 for the first) that all parameters share, by name."""

    def rule(
        self,
        theta: mx.array,
        gradient: mx.array,
        slots: Arrays,
        constants: Arrays,
        rate: mx.array,
        settings: LearnerSection,
    ) -> tuple[mx.array, Arrays]:
        """Parameter and slots after a step at learning rate `rate`.

        theta: the parameter, already decayed. constants, rate: float32 scalars, as arrays, so that a compiled step has
        them as inputs and not as its own.
        """
