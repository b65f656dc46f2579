"""The optimizers by name, and what they share: masters, decay, rates, and a state that a file can hold.

Everything is a function of arrays: parameters, gradients and state in, new parameters and new state out. Whatever the
parameters' type, gradients, state and update are float32; parameters of a narrower type (full-weight training in
bfloat16) have a float32 master copy in the state, and what is served is that copy, rounded. Without it, updates below
1/256 of a weight would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from clotho.config.schema import LearnerSection
from clotho.training.optimizers import adafactor, adamw, lion, muon, sgd
from clotho.training.optimizers.rule import Arrays, Rule

Slots = dict[str, Arrays]
Advance = Callable[[Arrays, Arrays, Slots, Arrays, Arrays, mx.array, mx.array], tuple[Arrays, Slots, Arrays]]

OPTIMIZERS: Mapping[str, Rule] = MappingProxyType(
    {"adamw": adamw, "adafactor": adafactor, "lion": lion, "muon": muon, "sgd": sgd}
)
"""`learner.optimizer` -> its rule."""


class OptimizerState(NamedTuple):
    """What an optimizer carries from step to step, in float32.

    step: steps taken. slots: slot name -> parameter name -> array, as the rules name them.
    master: full-precision copies of those parameters that are not float32 themselves.
    """

    step: int
    slots: Slots
    master: Arrays


def rule_of(kind: str, name: str, parameter: mx.array) -> Rule:
    """The rule by which an optimizer moves a parameter: its own, but muon leaves to adamw what is no hidden matrix."""
    return adamw if kind == "muon" and not muon.takes(name, parameter) else OPTIMIZERS[kind]


def initial_state(kind: str, parameters: Arrays) -> OptimizerState:
    """State before the first step: slots as the rules start them, masters equal to the parameters; lazy."""
    slots: Slots = {}
    for name, parameter in parameters.items():
        for slot, array in rule_of(kind, name, parameter).slots(parameter).items():
            slots.setdefault(slot, {})[name] = array
    master = {name: v.astype(mx.float32) for name, v in parameters.items() if v.dtype != mx.float32}
    return OptimizerState(step=0, slots=slots, master=master)


def step(
    parameters: Arrays,
    gradients: Arrays,
    state: OptimizerState,
    *,
    learning_rate: float,
    scale: float,
    settings: LearnerSection,
) -> tuple[Arrays, OptimizerState]:
    """Take one step of `settings.optimizer` against `scale` times the gradient.

    Every parameter needs a gradient. Returns new parameters, in their own types, and the new state; lazy.
    """
    return step_by(
        partial(advance, settings=settings),
        parameters,
        gradients,
        state,
        learning_rate=learning_rate,
        scale=scale,
        settings=settings,
    )


def step_by(
    advance: Advance,
    parameters: Arrays,
    gradients: Arrays,
    state: OptimizerState,
    *,
    learning_rate: float,
    scale: float,
    settings: LearnerSection,
) -> tuple[Arrays, OptimizerState]:
    """`step` by a given form of `advance`, compiled or not."""
    t = state.step + 1
    numbers = OPTIMIZERS[settings.optimizer].constants(t, settings)
    constants = {name: mx.array(number) for name, number in numbers.items()}
    rate, factor = mx.array(learning_rate), mx.array(scale)
    updated, slots, master = advance(parameters, gradients, state.slots, state.master, constants, rate, factor)
    return updated, OptimizerState(t, slots, master)


def advance(
    parameters: Arrays,
    gradients: Arrays,
    slots: Slots,
    master: Arrays,
    constants: Arrays,
    rate: mx.array,
    scale: mx.array,
    *,
    settings: LearnerSection,
) -> tuple[Arrays, Slots, Arrays]:
    """New parameters, slots and masters: a function of arrays alone, scalars included.

    constants: of the step, as the rules name them.
    For every optimizer: g is `scale` times the gradient; the adapter's `lora_b` learns at `lora_plus` times the rate
    (LoRA+, arXiv:2402.12354); theta <- (1 - rate weight_decay) theta before the rule, at the parameter's own rate
    (decoupled decay, arXiv:1711.05101, with the rate in it as PyTorch has it).
    """
    updated, new_slots, new_master = {}, {slot: dict[str, mx.array]() for slot in slots}, {}
    rates = [rate, rate * settings.lora_plus]
    kept = [1.0 - own_rate * settings.weight_decay for own_rate in rates]
    for name, parameter in parameters.items():
        plus = name.endswith("lora_b")
        theta = master.get(name, parameter)
        if settings.weight_decay:
            theta = kept[plus] * theta
        own = {slot: arrays[name] for slot, arrays in slots.items() if name in arrays}
        g = gradients[name].astype(mx.float32) * scale
        theta, own = rule_of(settings.optimizer, name, parameter).rule(theta, g, own, constants, rates[plus], settings)
        for slot, array in own.items():
            new_slots[slot][name] = array
        if name in master:
            new_master[name] = theta
        updated[name] = theta.astype(parameter.dtype)
    return updated, new_slots, new_master


def state_arrays(state: OptimizerState) -> Arrays:
    """Name every array of the state for a file: `SLOT.NAME`, `master.NAME`, and `step` (int32)."""
    arrays = {"step": mx.array(state.step, dtype=mx.int32)}
    for kind, table in {**state.slots, "master": state.master}.items():
        arrays |= {f"{kind}.{name}": array for name, array in table.items()}
    return arrays


def state_from_arrays(arrays: Mapping[str, mx.array], parameters: Arrays, *, kind: str) -> OptimizerState:
    """Rebuild the state that `state_arrays` named. Raises ValueError where it is not one of `kind` and `parameters`."""
    start = initial_state(kind, parameters)
    expected = state_arrays(start)
    wrong = sorted(expected.keys() ^ arrays.keys()) or sorted(
        name
        for name, value in expected.items()
        if (value.shape, value.dtype) != (arrays[name].shape, arrays[name].dtype)
    )
    if wrong:
        raise ValueError(f"the state is not one of {kind} for the trainable parameters: {', '.join(wrong[:3])}")

    def restored(kind: str, table: Arrays) -> Arrays:
        return {name: arrays[f"{kind}.{name}"] for name in table}

    return OptimizerState(
        step=int(np.array(arrays["step"])),
        slots={slot: restored(slot, table) for slot, table in start.slots.items()},
        master=restored("master", start.master),
    )


def state_bytes(kind: str, parameters: Arrays) -> int:
    """Bytes of the arrays of a state. Of the parameters only names, shapes and types count: they may be lazy."""
    return sum(array.nbytes for array in state_arrays(initial_state(kind, parameters)).values())
