"""What all optimizers share: masters, decay, rates of the adapter, and a state that a file can hold."""

from __future__ import annotations

from typing import get_args, get_type_hints

import mlx.core as mx
import numpy as np
import pytest

from clotho.config.schema import LearnerSection
from clotho.training.optimizers.state import (
    OPTIMIZERS,
    OptimizerState,
    initial_state,
    state_arrays,
    state_bytes,
    state_from_arrays,
    step,
)
from tests.training.optimizers.walks import Arrays, parameters, settings, walk

KINDS = list(OPTIMIZERS)


def bits(parameters: Arrays, state: OptimizerState) -> dict[str, bytes]:
    """Every array, bit for bit."""
    everything = {**{f"parameter.{name}": array for name, array in parameters.items()}, **state_arrays(state)}
    return {name: np.array(array.astype(mx.float32)).tobytes() for name, array in everything.items()}


def test_every_choice_of_the_profile_has_its_rule() -> None:
    """And no rule is out of reach."""
    assert set(KINDS) == set(get_args(get_type_hints(LearnerSection)["optimizer"]))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_was_given_is_changed(kind: str) -> None:
    """Parameters and state before a step are as they were, bit for bit: another may still serve them."""
    start = parameters()
    state = initial_state(kind, start)
    before = bits(start, state)
    after, _ = walk(settings(kind, weight_decay=0.1), 2, start=start, state=state)
    mx.eval(after)
    assert bits(start, state) == before
    assert state.step == 0


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_state_continues_bit_for_bit(kind: str, dtype: mx.Dtype) -> None:
    """Three steps, through names and arrays, and three more: the same as six."""
    how = settings(kind, weight_decay=0.1)
    whole = walk(how, 6, start=parameters(dtype))
    half, state = walk(how, 3, start=parameters(dtype))
    restored = state_from_arrays(state_arrays(state), half, kind=kind)
    assert bits(*walk(how, 3, start=half, state=restored, first=3)) == bits(*whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_narrow_parameters_are_the_master_rounded(kind: str, dtype: mx.Dtype) -> None:
    """What moves is the float32 copy, exactly as a float32 parameter with the same start would."""
    how = settings(kind, weight_decay=0.1)
    narrow, state = walk(how, 3, start=parameters(dtype))
    wide, _ = walk(how, 3, start={name: array.astype(mx.float32) for name, array in parameters(dtype).items()})
    for name, array in narrow.items():
        assert array.dtype == dtype
        assert mx.array_equal(state.master[name], wide[name])
        assert mx.array_equal(array, wide[name].astype(dtype))


def test_small_updates_of_narrow_parameters_add_up() -> None:
    """Eighty steps of 1e-4 move a bfloat16 weight of 1, although each alone is below its spacing of 1/256."""
    at = {"a": mx.ones(1, dtype=mx.bfloat16)}
    state = initial_state("adamw", at)
    for _ in range(80):
        at, state = step(at, {"a": mx.ones(1)}, state, learning_rate=1e-4, scale=1.0, settings=settings("adamw"))
    assert state.master["a"].item() == pytest.approx(1.0 - 80e-4, rel=1e-4)
    assert at["a"].item() == pytest.approx(0.992, abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_only_the_decay_moves(kind: str) -> None:
    """From a fresh state, and with no division by zero: theta times 1 - 0.01 x 0.1."""
    start = parameters()
    nothing = {name: mx.zeros(array.shape) for name, array in start.items()}
    for decay, factor in ((0.0, 1.0), (0.1, 0.999)):
        how = settings(kind, weight_decay=decay)
        after, _ = step(start, nothing, initial_state(kind, start), learning_rate=0.01, scale=1.0, settings=how)
        for name, array in after.items():
            np.testing.assert_allclose(np.array(array), factor * np.array(start[name]), rtol=1e-6 if decay else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapters_b_learns_at_its_own_multiple_of_the_rate(kind: str) -> None:
    """With lora_plus = 4 it moves as with four times the rate, decay included; A moves as before."""
    start = {"q_proj.lora_a": parameters()["tall"], "q_proj.lora_b": parameters()["wide"]}
    gradients = {name: mx.sin(3 * array) for name, array in start.items()}

    def moved(rate: float, lora_plus: float) -> Arrays:
        how = settings(kind, weight_decay=0.1, lora_plus=lora_plus)
        return step(start, gradients, initial_state(kind, start), learning_rate=rate, scale=1.0, settings=how)[0]

    plus, slow, fast = moved(0.01, 4.0), moved(0.01, 1.0), moved(0.04, 1.0)
    assert mx.array_equal(plus["q_proj.lora_a"], slow["q_proj.lora_a"])
    assert mx.allclose(plus["q_proj.lora_b"], fast["q_proj.lora_b"], rtol=1e-6, atol=0)
    assert not mx.allclose(plus["q_proj.lora_b"], slow["q_proj.lora_b"], rtol=1e-3, atol=0)


def test_a_state_of_other_parameters_or_another_optimizer_is_refused() -> None:
    """By name, by shape and by type."""
    arrays = state_arrays(initial_state("adamw", parameters()))
    wrong_shape = arrays | {"first.vector": mx.zeros((2, 3))}
    missing = {name: value for name, value in arrays.items() if name != "second.wide"}
    wrong_type = arrays | {"first.vector": mx.zeros((4,), dtype=mx.bfloat16)}
    for state, culprit in ((wrong_shape, "first.vector"), (missing, "second.wide"), (wrong_type, "first.vector")):
        with pytest.raises(ValueError, match=culprit):
            state_from_arrays(state, parameters(), kind="adamw")
    for kind in KINDS:
        for other in {*KINDS} - {kind}:
            with pytest.raises(ValueError, match=f"not one of {other}"):
                state_from_arrays(state_arrays(initial_state(kind, parameters())), parameters(), kind=other)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_state_are_known_beforehand(kind: str, dtype: mx.Dtype) -> None:
    """Those of its arrays once they are there."""
    _, state = walk(settings(kind), 1, start=parameters(dtype))
    assert state_bytes(kind, parameters(dtype)) == sum(len(value) for value in bits({}, state).values())


def test_the_bytes_of_known_states() -> None:
    """A (100, 10) bfloat16 matrix: adamw two slots and a master in float32; adafactor 110 numbers and a master."""
    matrix = {"a": mx.zeros((100, 10), dtype=mx.bfloat16)}
    sizes = {kind: state_bytes(kind, matrix) - 4 for kind in KINDS}
    assert sizes == {"adamw": 12000, "adafactor": 4440, "lion": 8000, "muon": 8000, "sgd": 8000}
