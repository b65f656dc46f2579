"""Steps in P, Lambda and Q, beside the equations of the paper in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from attachments.adalora.budget import best, budget
from attachments.adalora.rule import SENSITIVITY, UNCERTAINTY, VALUES, AdaLoraRule, ranks
from attachments.adalora.sections import AdaLora
from clotho.models.parameters import Arrays, flat
from clotho.settings.engine import SamplingSection
from clotho.training.optimizers import OptimizerState, state_arrays, state_from_arrays
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import learner, scored_group, tiny_policy

Array = NDArray[np.float64]

SETTINGS = AdaLora(target_rank=2, warmup_steps=2, final_steps=2, orthogonality=0.3)
SGD = learner_settings(optimizer="sgd", momentum=0.0, weight_decay=0.0)
STEPS, RATE = 9, 0.05
SHAPES = {"a": (5, 4, 6), "b": (7, 4, 3), "c": (4, 4, 4)}
"""Inputs, rank and outputs of modules."""


def slopes(function: Callable[..., float], values: Sequence[Array]) -> list[Array]:
    """Return central differences of a function by each number of its arguments."""
    found = []
    for index, value in enumerate(values):
        slope = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            ends = []
            for sign in (1, -1):
                moved = [one.copy() for one in values]
                moved[index][place] += sign * 1e-6
                ends.append(function(*moved))
            slope[place] = (ends[0] - ends[1]) / 2e-6
        found.append(slope)
    return found


class Oracle:
    """AdaLoRA as the paper writes it: W = P diag(lambda) Q, with plain gradient descent; one module per shape."""

    def __init__(self, values: dict[str, tuple[Array, Array, Array]], targets: dict[str, Array]) -> None:
        """values: P (outputs, R), lambda (R,) and Q (R, inputs) by module. targets: W at the least loss."""
        self.values, self.targets = values, targets
        self.mean: dict[str, list[Array]] = {k: [np.zeros_like(v) for v in one] for k, one in values.items()}
        self.spread: dict[str, list[Array]] = {k: [np.zeros_like(v) for v in one] for k, one in values.items()}

    def loss(self, module: str, P: Array, e: Array, Q: Array) -> float:
        """Half the squared distance from the target."""
        return float(0.5 * np.sum((P @ np.diag(e) @ Q - self.targets[module]) ** 2))

    def penalty(self, P: Array, Q: Array) -> float:
        """Equation 4, for columns of P of norm sqrt(n)."""
        eye = np.eye(len(Q))
        squares = np.sum((P.T @ P / len(P) - eye) ** 2) * len(P) + np.sum((Q @ Q.T - eye) ** 2)
        return float(SETTINGS.orthogonality * squares)

    def gradient(self, module: str) -> list[Array]:
        """Central differences of the loss by each number of P, lambda and Q."""
        return slopes(lambda *values: self.loss(module, *values), self.values[module])

    def step(self, number: int) -> None:
        """Algorithm 1, with an interval of one step, and the schedule of the authors' code."""
        scores: list[tuple[np.float64, str, int]] = []
        for module, value in self.values.items():
            gradient = self.gradient(module)
            for index, (w, g) in enumerate(zip(value, gradient, strict=True)):
                now = np.abs(w * g)
                self.mean[module][index] = 0.85 * self.mean[module][index] + 0.15 * now
                change = np.abs(now - self.mean[module][index])
                self.spread[module][index] = 0.85 * self.spread[module][index] + 0.15 * change
            s = [i * u for i, u in zip(self.mean[module], self.spread[module], strict=True)]
            scores += [(s[1][i] + s[0][:, i].mean() + s[2][i].mean(), module, i) for i in range(len(value[1]))]
            by_p, by_q = slopes(self.penalty, (value[0], value[2]))
            P, e, Q = (w - RATE * g for w, g in zip(value, gradient, strict=True))
            self.values[module] = (P - RATE * by_p, e, Q - RATE * by_q)
        first, last = 12, 6
        left = 1.0 - (number - 2) / (STEPS - 4)
        wanted = first if number < 2 else round(last + (first - last) * max(left, 0.0) ** 3)
        if number >= 2:
            kept = {(module, i) for _, module, i in sorted(scores, reverse=True)[:wanted]}
            for module, (_, e, _) in self.values.items():
                for i in range(len(e)):
                    if (module, i) not in kept:
                        e[i] = 0.0


def of_paper(values: Arrays, module: str) -> tuple[Array, Array, Array]:
    """Return P, lambda and Q in float64 from the arrays of the state, or what has their shapes."""
    p, e, q = (np.array(values[f"{module}.{name}"], dtype=np.float64) for name in ("lora_b", "lora_e", "lora_a"))
    return p.T, e[:, 0], q.T


def gradients(parameters: Arrays, targets: dict[str, Array]) -> Arrays:
    """Return the gradient of half the squared distance of (A B)^T from the targets, by A and B."""
    found: Arrays = {}
    for module, target in targets.items():
        a, b = parameters[f"{module}.lora_a"], parameters[f"{module}.lora_b"]
        error = a @ b - mx.array(target.T.astype(np.float32))
        found |= {f"{module}.lora_a": error @ b.T, f"{module}.lora_b": a.T @ error}
    return found


def start(*, zero: bool = False) -> tuple[Arrays, dict[str, Array]]:
    """Return matrices A and B, and targets for (A B)^T. zero: B is that of a new adapter."""
    rng = np.random.default_rng(0)
    arrays: Arrays = {}
    targets = {}
    for module, (inputs, rank, outputs) in SHAPES.items():
        arrays[f"{module}.lora_a"] = mx.array(rng.normal(size=(inputs, rank)).astype(np.float32) / 2)
        b = rng.normal(size=(rank, outputs)) * (0.0 if zero else 0.5)
        arrays[f"{module}.lora_b"] = mx.array(b.astype(np.float32))
        targets[module] = rng.normal(size=(outputs, inputs))
    return arrays, targets


def rule(**changes: Any) -> AdaLoraRule:
    """Return the rule of a short run."""
    return AdaLoraRule(replace(SETTINGS, **changes), steps=STEPS, seed=0)


def stepped(
    one: AdaLoraRule, arrays: Arrays, state: OptimizerState, targets: dict[str, Array], step: int
) -> tuple[Arrays, OptimizerState]:
    """Take an optimizer step."""
    gradient = one.gradient(gradients(arrays, targets), state)
    return one.apply(arrays, gradient, state, step=step, learning_rate=RATE, scale=1.0, settings=SGD)


@pytest.mark.needs_cpu_path  # float32 without the kernels of a device
def test_scores_schedule_and_penalty_are_those_of_the_paper() -> None:
    """In every step of a run: P, Lambda, Q, both averages and the pruned triplets, beside float64."""
    arrays, targets = start()
    one = rule()
    state = one.initial_state(arrays, SGD)
    oracle = Oracle({module: of_paper(state.slots[VALUES], module) for module in SHAPES}, targets)
    for step in range(STEPS - 2):  # then the chosen triplets stay
        arrays, state = stepped(one, arrays, state, targets, step)
        oracle.step(step)
        for module in SHAPES:
            P, e, Q = of_paper(state.slots[VALUES], module)
            for found, expected in zip((P, e, Q), oracle.values[module], strict=True):
                np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
            np.testing.assert_array_equal(e == 0, oracle.values[module][1] == 0)
            for slot, averages in ((SENSITIVITY, oracle.mean), (UNCERTAINTY, oracle.spread)):
                for found, wanted in zip(of_paper(state.slots[slot], module), averages[module], strict=True):
                    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-5)
            product = np.array(arrays[f"{module}.lora_a"] @ arrays[f"{module}.lora_b"]).T
            np.testing.assert_allclose(product, P @ np.diag(e) @ Q, atol=1e-5)


def test_the_gradient_is_that_of_the_loss() -> None:
    """By P, Lambda and Q, beside central differences in float64, within 1e-5 of the largest."""
    arrays, targets = start()
    one = rule()
    state = one.initial_state(arrays, SGD)
    found = one.gradient(gradients(arrays, targets), state)
    for module in SHAPES:
        oracle = Oracle({module: of_paper(state.slots[VALUES], module)}, targets)
        for own, expected in zip(of_paper(found, module), oracle.gradient(module), strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-5 * np.abs(expected).max())


def test_a_gradient_of_zero_moves_nothing() -> None:
    """So that a batch without a signal changes no weight: an update without a gradient takes no step."""
    arrays, _ = start()
    one = rule()
    found = one.gradient({name: mx.zeros_like(array) for name, array in arrays.items()}, one.initial_state(arrays, SGD))
    assert all(not np.array(array).any() for array in found.values())


@pytest.mark.parametrize("zero", [True, False])
def test_the_coordinates_compute_what_the_adapter_computes(zero: bool) -> None:
    """A new adapter has Lambda = 0; of any other, the entries of P have the mean square 1. Equal seeds give equal P."""
    arrays, _ = start(zero=zero)
    first, second = (rule().initial_state(arrays, SGD).slots[VALUES] for _ in range(2))
    for module in SHAPES:
        P, e, Q = of_paper(first, module)
        product = np.array(arrays[f"{module}.lora_a"] @ arrays[f"{module}.lora_b"]).T
        np.testing.assert_allclose(P @ np.diag(e) @ Q, product, atol=1e-6)
        assert (e == 0).all() == zero
        squares = np.mean(np.square(P), axis=0)
        assert squares.mean() == pytest.approx(1.0, rel=0.9) if zero else squares == pytest.approx(np.ones(4), rel=1e-5)
        np.testing.assert_array_equal(P, of_paper(second, module)[0])


def test_the_first_step_of_adam_changes_b_as_much_as_with_lora() -> None:
    """By the learning rate in the mean of squares, so that the learning rates of LoRA suit."""
    arrays, targets = start(zero=True)
    one, adamw = rule(), learner_settings()
    state = one.initial_state(arrays, adamw)
    found, _ = one.apply(
        arrays,
        one.gradient(gradients(arrays, targets), state),
        state,
        step=0,
        learning_rate=1e-3,
        scale=1.0,
        settings=adamw,
    )
    moved = np.concatenate([np.array(found[f"{module}.lora_b"]).reshape(-1) for module in SHAPES])
    assert np.sqrt(np.mean(np.square(moved))) == pytest.approx(1e-3, rel=0.3)


def test_ranks_stay_in_the_warm_up_then_fall_to_the_target_and_stay_there() -> None:
    """Each module has at least zero triplets and all together have the budget; what is chosen at the end stays."""
    arrays, targets = start(zero=True)
    one = rule()
    state = one.initial_state(arrays, SGD)
    found = []
    for step in range(STEPS):
        arrays, state = stepped(one, arrays, state, targets, step)
        found.append(ranks(state.slots[VALUES]))
    assert [sum(row) for row in found] == [12, 12, 12, 9, 7, 6, 6, 6, 6]
    assert found[-1] == found[-2] == found[-3]


def test_between_two_choices_all_triplets_learn() -> None:
    """With an interval of 3: in the steps 2 and 5, and in the first of the last."""
    arrays, targets = start()
    one = rule(interval=3)
    state = one.initial_state(arrays, SGD)
    found = []
    for step in range(STEPS):
        arrays, state = stepped(one, arrays, state, targets, step)
        found.append(sum(ranks(state.slots[VALUES])))
    assert found == [12, 12, 12, 12, 12, 6, 12, 6, 6]


def test_the_state_is_restored_bit_for_bit() -> None:
    """With names, shapes and types of its own; a state of another rule is refused."""
    arrays, targets = start()
    one = rule()
    adamw = learner_settings()
    state = one.initial_state(arrays, adamw)
    gradient = one.gradient(gradients(arrays, targets), state)
    arrays, state = one.apply(arrays, gradient, state, step=0, learning_rate=RATE, scale=1.0, settings=adamw)
    named = state_arrays(state)
    restored = state_arrays(state_from_arrays(named, arrays, adamw, one))
    assert list(restored) == list(named)
    assert all(np.array_equal(np.array(named[name]), np.array(restored[name])) for name in named)
    with pytest.raises(ValueError, match="adalora"):
        state_from_arrays(named, arrays, adamw)


def test_experts_have_triplets_of_their_own() -> None:
    """Lambda and scores of every expert; A and B keep the layout of mlx-lm."""
    rng = np.random.default_rng(1)
    shapes = {"m.lora_a": (3, 4, 5), "m.lora_b": (3, 6, 4)}
    arrays = {name: mx.array(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    slopes = {name: mx.array(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    one = AdaLoraRule(replace(SETTINGS, target_rank=1), steps=STEPS, seed=0)
    state = one.initial_state(arrays, SGD)
    after, state = one.apply(
        arrays, one.gradient(slopes, state), state, step=STEPS - 1, learning_rate=RATE, scale=1.0, settings=SGD
    )
    assert {name: array.shape for name, array in after.items()} == shapes
    found = ranks(state.slots[VALUES])
    assert len(found) == 3
    assert sum(found) == 3
    columns = (np.array(after["m.lora_b"]) != 0).any(axis=1).sum(axis=-1)
    assert columns.tolist() == found


def test_a_learner_trains_with_the_rule_and_its_pruned_modules_raise_no_alarm() -> None:
    """A module without triplets has a gradient and does not move; the others do."""
    policy = tiny_policy()
    plain = learner(policy, steps=STEPS)
    trained = type(plain)(policy, plain._settings, SamplingSection(), steps=STEPS, rule=rule(target_rank=1))
    groups = [scored_group([[3, 4, 5], [6, 7]], [1.0, 0.0])]
    for step in range(STEPS):
        update = trained.update(groups, step=step)
        assert update.applied
    found = ranks(trained.snapshot().state.optimizer.slots[VALUES])
    assert sum(found) == len(found)
    assert 0 in found
    rows = [np.array(array).any(axis=-1).sum() for name, array in flat(trained.parameters).items() if "lora_b" in name]
    assert sorted(map(int, rows)) == sorted(found)


def test_the_budget_falls_with_a_cubic_curve() -> None:
    """b0 in the warm-up, then b0 to bT, and bT from `final_steps` before the end on."""
    settings = AdaLora(warmup_steps=10, final_steps=20)
    found = [budget(step, steps=100, first=1200, last=400, settings=settings) for step in range(100)]
    assert found[:11] == [1200] * 11
    assert found[45] == 400 + 800 // 8
    assert found[80:] == [400] * 20
    assert found == sorted(found, reverse=True)


def test_the_best_of_all_modules_are_kept() -> None:
    """Of equal scores, the first ones."""
    found = best([np.array([[0.1], [0.5]]), np.array([[0.5], [0.2]]), np.array([[0.0]])], 2)
    assert [one[:, 0].tolist() for one in found] == [[False, True], [True, False], [False]]
