"""Rank 0 assigns micro-batches and adds gradients: the update is that of one rank.

The other ranks of these tests are in this process. They receive and send the same bytes as over a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from attachments.ranks.learner_ranks import LearnerRanks, assign, grouped
from attachments.ranks.messages import (
    Add,
    Computed,
    End,
    Instruction,
    Lost,
    RankFailed,
    RankReady,
    Setup,
    decode_instruction,
    encode,
)
from attachments.ranks.sections import DISTRIBUTED
from attachments.ranks.worker import ShareComputer
from clotho.lanes.arbiter import WorkCancelled
from clotho.models.parameters import flat, layout
from clotho.models.turns import UNSHARED, Turns
from clotho.settings.engine import SamplingSection
from clotho.settings.model import PolicySection
from clotho.training.update import PolicyLearner, Update
from protocols.errors import ProfileError, RankError
from tests.learner_settings import learner_settings
from tests.recorded_turns import RecordedTurns
from tests.training.policies_and_groups import VOCAB, random_groups, tiny_policy
from tests.training_run.built_context import tiny_profile
from training_run.profile.mounted import without_settings
from training_run.update_values import TokenRecord, UpdateKl


class RanksInProcess:
    """Other ranks that compute their shares when they receive them. size: number of ranks.

    change: changes the answers of the other ranks. kinds: of the instructions, in order.
    """

    def __init__(
        self, ranks: int, settings: dict[str, Any], change: Callable[[Computed], Computed | RankFailed]
    ) -> None:
        self.size, self.kinds, self.lost = ranks, list[str](), list[int | None]()
        section = learner_settings(**settings)
        self._computers = [ShareComputer(tiny_policy(), section, SamplingSection()) for _ in range(1, ranks)]
        self._change = change
        self.receive: Callable[[int, bytes], None] = lambda rank, content: None

    def join(self, receive: Callable[[int, bytes], None]) -> RanksInProcess:
        self.receive = receive
        return self

    def send(self, rank: int, message: bytes) -> None:
        instruction = decode_instruction(message)
        self.kinds.append(type(instruction).__name__)
        if isinstance(instruction, Add | End | Lost):
            return
        answer = self._computers[rank - 1].follow(instruction, abandoned=lambda: False)
        if answer is not None:
            self.receive(rank, encode(self._change(answer)))

    def add(self, arrays: Mapping[str, mx.array]) -> dict[str, NDArray[np.float32]]:
        total = {name: np.array(array) for name, array in arrays.items()}
        for computer in self._computers:
            total = {name: total[name] + np.array(array) for name, array in computer.take_gradient().items()}
        return total

    def lose(self, rank: int | None, reason: str) -> None:
        self.lost.append(rank)

    def resumable(self, run_directory: str) -> None: ...

    def expect_end(self) -> bool:
        return True

    def close(self) -> None: ...


def unchanged(answer: Computed) -> Computed:
    """Return the answer."""
    return answer


def learner(
    ranks: int,
    settings: dict[str, Any],
    change: Callable[[Computed], Computed | RankFailed] = unchanged,
    *,
    lane: Turns = UNSHARED,
) -> tuple[PolicyLearner, RanksInProcess]:
    """Return a learner with so many ranks."""
    group = RanksInProcess(ranks, settings, change)
    section = learner_settings(**settings)
    others = LearnerRanks(group.join, share_seconds=60.0) if ranks > 1 else None
    made = PolicyLearner(
        tiny_policy(),
        section,
        SamplingSection(),
        steps=10,
        measure=UpdateKl(1),
        recorder=TokenRecord,
        ranks=others,
        lane=lane,
    )
    return made, group


def updates(ranks: int, settings: dict[str, Any], count: int) -> tuple[list[Update], RanksInProcess]:
    """Return the results of some updates."""
    made, group = learner(ranks, settings)
    return [made.update(random_groups(VOCAB, groups=4, seed=seed)) for seed in range(count)], group


def relative_difference(first: Update, second: Update) -> float:
    """Return the norm of the difference of the weights, relative to their norm."""
    left, right = flat(first.parameters), flat(second.parameters)
    difference = sum(float(mx.square(left[name] - right[name]).sum()) for name in left)
    return float(np.sqrt(difference / sum(float(mx.square(array).sum()) for array in left.values())))


SETTINGS: list[dict[str, Any]] = [
    {"learning_rate": 1e-3, "schedule": "constant", "micro_batch_tokens": 64},
    {"learning_rate": 1e-3, "schedule": "constant", "micro_batch_tokens": 4096, "layout": "shared"},
    {
        "learning_rate": 1e-3, "schedule": "constant", "micro_batch_tokens": 40, "kl_beta": 0.1, "kl_in": "reward",
        "reference": "average", "ref_ema": 0.5, "num_minibatches": 2, "update_epochs": 2,
    },
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=["micro-batches", "one micro-batch, shared prompts", "all passes"])
def test_an_update_of_two_ranks_equals_that_of_one(settings: dict[str, Any]) -> None:
    """Weights, metrics and values of tokens are equal up to the order of sums."""
    count = 1 if settings["micro_batch_tokens"] > 1000 else 2
    alone, (together, group) = updates(1, settings, count)[0], updates(2, settings, count)
    assert group.kinds[:3] == ["RankWeights", "GradientShare", "Add"] or "LogprobsShare" in group.kinds
    for one, two in zip(alone, together, strict=True):
        assert two.applied
        assert relative_difference(one, two) < 1e-6
        assert two.metrics.grad_norm == pytest.approx(one.metrics.grad_norm, rel=1e-5)
        assert two.metrics.loss == pytest.approx(one.metrics.loss, rel=1e-4, abs=1e-6)
        assert two.metrics.entropy == pytest.approx(one.metrics.entropy, rel=1e-5)
        assert two.metrics.update_kl == pytest.approx(one.metrics.update_kl, rel=1e-2, abs=1e-9)
        assert [[row.cut for row in rows] for rows in two.tokens] == [[row.cut for row in rows] for rows in one.tokens]


def test_every_rank_gets_the_settings_of_rank_0(tmp_path: Path) -> None:
    """Those of its profile that apply to every rank, and what identifies the model."""
    profile = tiny_profile(tmp_path, seed=7)
    parameters = tiny_policy().trainable()
    group, found = RanksInProcess(3, SETTINGS[0], unchanged), dict[int, Instruction]()
    others = LearnerRanks(group.join, share_seconds=60.0)

    def send(rank: int, message: bytes) -> None:
        found[rank] = decode_instruction(message)
        group.receive(rank, encode(RankReady(layout=layout(parameters))))

    group.send = send  # type: ignore[method-assign]
    others.set_up(profile, parameters, model="its files", memory_bytes=8)
    assert found.keys() == {1, 2}
    for setup in found.values():
        assert isinstance(setup, Setup)
        policy = without_settings(profile.policy, PolicySection)
        assert (setup.model, setup.policy, setup.learner) == (profile.model, policy, profile.learner)
        assert (setup.sampling, setup.distributed) == (profile.sampling, DISTRIBUTED.of(profile))
        assert (setup.seed, setup.model_fingerprint, setup.memory_bytes) == (7, "its files", 8)


def test_more_ranks_than_completions_compute_the_same() -> None:
    """A rank with an empty share adds zeros."""
    groups = random_groups(VOCAB, groups=1, size=2)
    results = []
    for ranks in (1, 4):
        made, _ = learner(ranks, SETTINGS[0])
        results.append(made.update(groups))
    assert relative_difference(*results) < 1e-6


def test_every_update_sends_its_weights_once() -> None:
    """A rehearsal uses no other rank."""
    made, group = learner(2, SETTINGS[0])
    groups = random_groups(VOCAB, groups=1)
    made.update(groups)
    made.rehearse([(1, groups)])
    made.update(groups)
    assert group.kinds == ["RankWeights", "GradientShare", "Add"] * 2


def test_a_gradient_that_is_not_finite_rejects_the_update_of_all_ranks() -> None:
    """The sum is not finite if one share is not."""
    made, group = learner(2, SETTINGS[0])
    add = group.add

    def with_nan(arrays: Mapping[str, mx.array]) -> dict[str, NDArray[np.float32]]:
        return {name: array * np.float32("nan") for name, array in add(arrays).items()}

    group.add = with_nan  # type: ignore[method-assign]
    result = made.update(random_groups(VOCAB, groups=1))
    assert not result.finite
    assert not result.applied


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: replace(answer, fingerprint="0" * 16),
        lambda answer: RankFailed(message="out of memory", exit_status=1),
    ],
    ids=["other weights", "failure"],
)
def test_a_wrong_answer_fails_the_update_with_the_rank(change: Callable[[Computed], Computed | RankFailed]) -> None:
    """The error names the rank, and nothing has changed."""
    made, _ = learner(2, SETTINGS[0], change)
    before = made.parameters
    with pytest.raises(RankError, match="rank 1"):
        made.update(random_groups(VOCAB, groups=1))
    assert made.parameters is before


def test_an_abandoned_update_leaves_no_answer_for_the_next_one() -> None:
    """A run that is stopped ends the update at any pause."""

    def cancel(number: int) -> None:
        if number == 1:
            raise WorkCancelled

    made, _ = learner(2, SETTINGS[0], lane=RecordedTurns(cancel))
    with pytest.raises(WorkCancelled):
        made.update(random_groups(VOCAB, seed=1))
    result = made.update(random_groups(VOCAB, groups=1))
    assert result.applied


def test_a_late_share_loses_its_rank() -> None:
    """`distributed.share_seconds` counts from the end of the own share."""
    group = RanksInProcess(2, SETTINGS[0], unchanged)
    others = LearnerRanks(group.join, share_seconds=1e-6)
    group.send = lambda rank, message: None  # type: ignore[method-assign]

    def cancel_when_lost(number: int) -> None:
        if group.lost:
            raise WorkCancelled

    made = PolicyLearner(
        tiny_policy(),
        learner_settings(**SETTINGS[0]),
        SamplingSection(),
        steps=10,
        ranks=others,
        lane=RecordedTurns(cancel_when_lost),
    )
    with pytest.raises(WorkCancelled):
        made.update(random_groups(VOCAB, groups=1))
    assert group.lost == [1]


@pytest.mark.parametrize(
    ("costs", "speeds", "expected"),
    [
        ([5, 3, 2], [1.0, 1.0], [[0], [1, 2]]),
        ([1, 1, 1, 1], [1.0, 1.0], [[0, 2], [1, 3]]),
        ([2, 7], [1.0, 1.0, 1.0], [[1], [0], []]),
        ([0, 0, 0], [1.0, 1.0], [[0, 2], [1]]),
        ([1, 1, 1, 1], [3.0, 1.0], [[0, 1, 2], [3]]),
        ([4, 2, 2], [1.0, 100.0], [[2], [0, 1]]),
    ],
)
def test_micro_batches_are_assigned_by_their_cost(
    costs: Sequence[int], speeds: Sequence[float], expected: list[list[int]]
) -> None:
    """The most expensive ones first, each to the rank that finishes it first; rank 0 never gets none."""
    assert assign(costs, speeds) == expected


def test_shares_name_every_rank() -> None:
    """Another number of values than ranks is refused."""
    with pytest.raises(ProfileError, match="2 given, 3 ranks"):
        LearnerRanks(RanksInProcess(3, SETTINGS[0], unchanged).join, share_seconds=60.0, shares=(1.0, 2.0))


def test_the_work_of_every_rank_is_counted() -> None:
    """Positions, seconds and bytes; a faster rank gets a larger share."""
    settings = SETTINGS[0] | {"micro_batch_tokens": 16}
    group = RanksInProcess(2, settings, unchanged)
    others = LearnerRanks(group.join, share_seconds=60.0, shares=(3.0, 1.0))
    made = PolicyLearner(tiny_policy(), learner_settings(**settings), SamplingSection(), steps=10, ranks=others)
    made.update(random_groups(VOCAB, groups=4))
    first, second = others.gauges().ranks
    assert (first.name, second.name) == ("0", "1")
    assert first.positions > 2 * second.positions > 0
    assert first.seconds > 0.0 < second.seconds
    assert first.bytes_sent == 0 < second.bytes_sent


def test_large_weights_take_several_messages() -> None:
    """An array above the limit has a message of its own, and all arrays arrive."""
    arrays = {name: mx.zeros(size, dtype=mx.uint8) for name, size in (("a", 3), ("b", 3), ("c", 9), ("d", 1))}
    assert [list(group) for group in grouped(arrays, limit=6)] == [["a", "b"], ["c"], ["d"]]


def test_the_time_that_rank_0_waits_is_that_of_shares_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves while rank 0 waits for the share of the other rank, 2 s, and while they add, 3 s."""
    now = 100.0
    group = RanksInProcess(2, SETTINGS[0], unchanged)
    ranks = LearnerRanks(group.join, share_seconds=60.0)
    answers, add = ranks._answers, group.add

    class Later:
        put = answers.put

        def get(self, timeout: float) -> Any:
            nonlocal now
            now += 2.0
            return answers.get(timeout=timeout)

    def add_later(arrays: Mapping[str, mx.array]) -> dict[str, NDArray[np.float32]]:
        nonlocal now
        now += 3.0
        return add(arrays)

    monkeypatch.setattr("attachments.ranks.learner_ranks.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ranks, "_answers", Later())
    monkeypatch.setattr(group, "add", add_later)
    made = PolicyLearner(
        tiny_policy(), learner_settings(**SETTINGS[0]), SamplingSection(), steps=10, measure=None, ranks=ranks
    )
    for count in (1, 2):
        made.update(random_groups(VOCAB, groups=4, seed=count))
        assert ranks.gauges().waited_seconds == 5.0 * count
