"""Turns of the learner: bounded parts of an evaluation, with decode steps in between."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from structlog.testing import capture_logs

from clotho.models.machine import random_state
from clotho.models.parameters import flat, nested
from clotho.models.policy import Policy, TrainablePolicy
from clotho.models.policy_model import checkpointed_blocks
from clotho.models.stages import Stage, recorded_stages
from clotho.models.turns import UNDIVIDED, TurnBudget
from clotho.training.update import Update
from protocols.rollout import ScoredGroup
from tests import model_lanes
from tests.learner_settings import policy_settings
from tests.models.test_blocked_attention import in_blocks
from tests.recorded_turns import RecordedTurns
from tests.small_models import ATTENTION, tiny
from tests.training.policies_and_groups import BigramPolicy, learner, random_groups, same_bits, tiny_policy
from tests.training.test_gradient import gradients

CASES = [
    *(("qwen3", layout, layout == "padded") for layout in ("padded", "packed", "shared")),
    ("llama", "padded", True),
    ("gemma3_text", "packed", False),
    ("qwen3_moe", "shared", False),
    ("lfm2", "padded", False),
    ("lfm2", "padded", True),
]
VOCABULARY = 64
SHORT = 1e-9
"""A `learner.max_turn_ms` that nothing fits into: every stage has a turn of its own."""


def policy_of(family: str, **section: Any) -> Policy:
    """A random model of a family with an adapter on every linear layer."""
    model_lanes.skip_full_training(section.get("kind", "lora"))
    settings = policy_settings(**{"rank": 4, "scale": 2.0, **section})
    config = {"model_type": family, **ATTENTION, "vocab_size": VOCABULARY}
    return Policy(tiny(family), cast(Any, None), settings, config=config, seed=0, keep_reference=True)


def groups() -> list[ScoredGroup]:
    """Groups whose completions share a prompt."""
    return random_groups(VOCABULARY, groups=3, size=4)


class ScriptedTime:
    """A clock that advances by evaluations only: each array takes `cost` seconds. evaluated: arrays per evaluation."""

    def __init__(self, cost: float) -> None:
        self.now, self.cost, self.evaluated = 0.0, cost, list[int]()

    def __call__(self) -> float:
        return self.now

    def evaluate(self, arrays: Any) -> None:
        self.evaluated.append(len(arrays))
        self.now += self.cost * len(arrays)


def stages(count: int, *, kind: Any = "block") -> list[Stage]:
    """Stages of one array each."""
    return [Stage(kind, [mx.array(0)], 1) for _ in range(count)]


def stages_per_turn(budget: TurnBudget, clock: ScriptedTime, count: int) -> list[int]:
    """Evaluate stages; return how many each turn evaluated."""
    seen = []
    clock.evaluated.clear()
    for _ in budget.parts(stages(count), []):
        seen.append(sum(clock.evaluated))
        clock.evaluated.clear()
    return [*seen, sum(clock.evaluated)]


def one_stage_per_turn() -> TurnBudget:
    """A new budget."""
    return TurnBudget(SHORT / 1000)


@pytest.mark.parametrize(("family", "layout", "grad_checkpoint"), CASES)
def test_turns_change_no_bit_of_the_gradient(family: str, layout: str, grad_checkpoint: bool) -> None:
    """Every family and layout, with and without recomputed blocks; state-space layers have padded rows only."""
    policy = policy_of(family, grad_checkpoint=grad_checkpoint)
    whole = gradients(policy, groups(), layout=layout)
    divided = gradients(policy, groups(), layout=layout, turns=one_stage_per_turn())
    for one, other in zip(whole, divided, strict=True):
        assert same_bits(one.arrays, other.arrays)
        assert float(one.loss) == float(other.loss)


BLOCKED = [
    ("qwen3", "shared", True),
    ("llama", "packed", False),
    ("gemma3_text", "padded", True),
    ("lfm2", "padded", False),
]


@pytest.mark.parametrize(("family", "layout", "grad_checkpoint"), BLOCKED)
def test_turns_between_blocks_of_queries_change_no_bit_of_the_gradient(
    monkeypatch: pytest.MonkeyPatch, family: str, layout: str, grad_checkpoint: bool
) -> None:
    """Long sequences, whose attention has stages of its own in both passes."""
    in_blocks(monkeypatch)
    test_turns_change_no_bit_of_the_gradient(family, layout, grad_checkpoint)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ({"kind": "dora"}, {}),
        ({"kind": "full", "grad_checkpoint": True}, {"entropy_weight": 0.05}),
        ({"dropout": 0.3}, {"kl_beta": 0.1, "entropy_weight": 0.05}),
    ],
)
def test_turns_change_no_bit_with_any_method_or_penalty(section: dict[str, Any], keys: dict[str, Any]) -> None:
    """Dropout samples the same masks, because they belong to the graph, which is built in one turn."""
    policy = policy_of("qwen3", **section)
    found = []
    for turns in (UNDIVIDED, one_stage_per_turn()):
        mx.random.seed(3)
        found.append(gradients(policy, groups(), layout="shared", turns=turns, **keys))
    for one, other in zip(*found, strict=True):
        assert same_bits(one.arrays, other.arrays)


class OtherWork:
    """What a decode thread does between two turns of the learner: forward passes, and a weight swap."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._first = policy, policy.trainable()
        self._logits = self._served()

    def _served(self) -> bytes:
        return model_lanes.numpy(self._policy.model(mx.array([[1, 2, 3]]))).tobytes()

    def __call__(self, number: int) -> None:
        state = random_state()
        assert not self._policy.model.training
        assert self._served() == self._logits
        other = {name: array + 0.01 * number for name, array in flat(self._first).items()}
        self._policy.publish(nested(other), version=number, step=number, fingerprint="other")
        self._logits = self._served()
        mx.eval(mx.random.normal((3,), key=mx.random.key(number)))
        assert random_state() == state


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_work_between_turns_does_not_change_an_update(kind: str) -> None:
    """Decode steps, random numbers and a weight swap between all turns: the update is that of an undivided one."""
    updates: list[Update] = []
    for milliseconds in (0, SHORT):
        policy = policy_of("llama", kind=kind, **({} if kind == "full" else {"dropout": 0.2}))
        between = OtherWork(policy)
        lane = RecordedTurns(between if milliseconds else lambda number: None)
        one = learner(
            policy, micro_batch_tokens=48, kl_beta=0.1, max_turn_ms=milliseconds, measure_update_kl=True, lane=lane
        )
        mx.random.seed(11)
        updates.append(one.update(groups()))
        assert lane.pauses > (30 if milliseconds else 1)
    assert same_bits(updates[0].parameters, updates[1].parameters)
    assert updates[0].metrics == updates[1].metrics


class CancelledError(Exception):
    """Ends a computation at a pause."""


def test_an_update_that_is_cancelled_between_blocks_changes_nothing() -> None:
    """After any number of turns: weights, optimizer, and the mode of the learner's model."""
    policy = tiny_policy(dropout=0.2)
    last = 0

    def cancel(number: int) -> None:
        if number == last:
            raise CancelledError

    whole, lane = RecordedTurns(), RecordedTurns(cancel)
    learner(policy, max_turn_ms=SHORT, micro_batch_tokens=24, lane=whole).update(random_groups(32))
    assert whole.pauses > 20
    one = learner(policy, max_turn_ms=SHORT, micro_batch_tokens=24, lane=lane)
    before, state = one.parameters, one.state()
    for number in range(1, whole.pauses, 7):
        lane.pauses, last = 0, number
        with pytest.raises(CancelledError):
            one.update(random_groups(32))
        assert not one.model.model.training
    assert same_bits(one.parameters, before)
    assert same_bits(one.state(), state)


def matrix_products(results: Any, path: Path) -> int:
    """Number of matrix products in the graph that are not computed yet."""
    mx.export_to_dot(str(path), results)
    return len(re.findall(r'label ?= ?"(?:Matmul|AddMM|GatherMM|QuantizedMatmul)', path.read_text()))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_turn_of_a_long_sequence_computes_one_block_of_queries(
    monkeypatch: pytest.MonkeyPatch, checkpointed: bool
) -> None:
    """In both passes of every block of the model; the backward pass of a block ends with its gradients."""
    in_blocks(monkeypatch, queries=10)
    model = tiny("llama")

    def loss(parameters: Any) -> mx.array:
        model.update(parameters)
        return cast(mx.array, model(mx.arange(24)[None] % 7).square().mean())

    with (
        checkpointed_blocks(model.layers if checkpointed else []),
        recorded_stages(model.layers, gradients=True) as recorded,
    ):
        tree = mx.grad(loss)(model.trainable_parameters())
    found = recorded.take(flat(tree))
    forward, recomputed = ["attention"] * 3, ["attention"] * 3 * checkpointed
    backward = [*recomputed, "block gradient", *["attention gradient"] * 3, "block gradient"]
    assert [stage.kind for stage in found] == [*[*forward, "block"] * 2, *backward * 2, "other gradients"]
    assert {stage.work for stage in found if stage.kind == "attention gradient"} == {10 * 10, 10 * 20, 4 * 24}


@pytest.mark.needs_float32  # quantized layers have no gradients of weights, so their blocks have fewer products
@pytest.mark.parametrize("layers", [4, 8])
def test_a_turn_computes_at_most_one_block(layers: int, tmp_path: Path) -> None:
    """Counted in matrix products: the largest turn of a model of any depth is the backward pass of one block."""
    model = tiny("llama", num_hidden_layers=layers)
    budget = one_stage_per_turn()
    parameters = model.trainable_parameters()

    def loss(parameters: Any) -> mx.array:
        model.update(parameters)
        return cast(mx.array, model(mx.arange(24)[None] % 7).square().mean())

    with budget.recorded(model, gradients=True) as recorded:
        value, tree = mx.value_and_grad(loss)(nested(flat(parameters)))
    model.update(parameters)
    arrays = flat(tree)
    results = [*arrays.values(), value]
    left, largest = matrix_products(results, tmp_path / "graph"), 0
    everything = left
    for _ in budget.parts(recorded.take(arrays), results):
        now = matrix_products(results, tmp_path / "graph")
        left, largest = now, max(largest, left - now)
    per_block = 9  # seven linear layers and two products of attention
    assert 3 * per_block * layers <= everything
    assert 0 < largest <= 2 * per_block + 2


def test_stages_share_a_turn_until_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of five stages: five in each turn, the first of which is measured alone, and then the rest."""
    clock = ScriptedTime(0.01)
    monkeypatch.setattr(mx, "eval", clock.evaluate)
    budget = TurnBudget(0.0501, clock=clock)
    assert stages_per_turn(budget, clock, 14) == [5, 5, 4]
    budget.pause()  # what the turn took before it counts for nothing
    assert stages_per_turn(budget, clock, 14) == [5, 5, 4]


def test_an_evaluation_that_fits_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once times are known, everything is one evaluation of the results, without a yield."""
    clock = ScriptedTime(0.01)
    monkeypatch.setattr(mx, "eval", clock.evaluate)
    budget = TurnBudget(1.0, clock=clock)
    budget.evaluate(stages(1), [])
    clock.evaluated.clear()
    assert list(budget.parts(stages(20), ["result"])) == []
    assert clock.evaluated == [1, 1]


def test_turns_become_shorter_when_blocks_become_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer sequences, or a machine with other work: the expected times follow the measured ones."""
    clock = ScriptedTime(0.01)
    monkeypatch.setattr(mx, "eval", clock.evaluate)
    budget = TurnBudget(0.101, clock=clock)
    budget.evaluate(stages(30), [])
    clock.cost = 0.04
    assert stages_per_turn(budget, clock, 200)[-2] == 2


def test_a_model_without_blocks_is_computed_in_one_turn_with_one_warning() -> None:
    """The gradient is the same, and the log says once that turns are not divided."""
    policy: TrainablePolicy = BigramPolicy()
    budget = one_stage_per_turn()
    expected = gradients(policy, random_groups(5))
    with capture_logs() as logs:
        found = [gradients(policy, random_groups(5), turns=budget) for _ in range(2)]
    assert all(same_bits(one[0].arrays, expected[0].arrays) for one in found)
    assert [entry["event"] for entry in logs] == ["learner_turns_not_divided"]


def test_without_a_limit_an_update_pauses_after_each_micro_batch_and_each_step() -> None:
    """`max_turn_ms = 0` records no stages."""

    def pauses(limit: float, *, tokens: int = 24) -> int:
        lane = RecordedTurns()
        learner(tiny_policy(), micro_batch_tokens=tokens, max_turn_ms=limit, lane=lane).update(random_groups(32))
        return lane.pauses

    assert pauses(0.0) == pauses(1e9) < pauses(SHORT)
    assert pauses(0.0, tokens=1000) == 2


def test_an_evaluation_pauses_its_lane_where_a_part_ends() -> None:
    """`evaluate` is `parts` with the pauses of a thread."""
    lane = RecordedTurns()
    parts = list(TurnBudget(SHORT / 1000).parts(stages(5), []))
    TurnBudget(SHORT / 1000, lane).evaluate(stages(5), [])
    assert lane.pauses == len(parts) > 2
