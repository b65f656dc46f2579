"""A line of metrics.jsonl: the numbers of a batch, by the names that readers know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from clotho.monitoring.metrics import Moment, step_metrics
from protocols.step import StepReport, TrainedGroup, UpdateMetrics
from protocols.summary import RunGauges
from tests.training.learning import scored_group

UPDATE = UpdateMetrics(
    loss=-0.01, kl=0.002, entropy=0.7, clip_fraction=0.01, mismatch_kl=1e-6, ratio_mean=1.0, grad_norm=0.3,
    learning_rate=1e-5, tokens=6, applied=True, ess=0.9, rejected_fraction=0.05, kl_beta=0.02, entropy_weight=1e-3,
    optimizer_steps=4,
)  # fmt: skip
EMPTY = StepReport(
    step=3, version=2, fingerprint="f", trained=(), discarded=(), staleness=(), update=None, train_seconds=0.0,
    wait_seconds=0.0,
)  # fmt: skip


def line(ended_early: Mapping[tuple[str, str], int] = {}, **changes: Any) -> dict[str, Any]:
    """What a report becomes in the file."""
    moment = Moment(seconds=1.0, gauges=RunGauges())
    report = msgspec.structs.replace(EMPTY, **changes)
    record = step_metrics(report, now=moment, before=moment, ended_early=ended_early)
    return dict(json.loads(msgspec.json.encode(record)))


def test_the_histogram_counts_trained_groups_by_their_age() -> None:
    """In ascending order; an empty one where nothing was learned."""
    group = TrainedGroup(scored=scored_group([[1], [2]], [0.0, 1.0]), advantages=(-1.0, 1.0))
    found = line(trained=(group,) * 5, staleness=(2, 0, 0, 11, 2), update=UPDATE)
    assert list(found["staleness_histogram"].items()) == [("0", 2), ("2", 2), ("11", 1)]
    assert (found["staleness_mean"], found["staleness_max"]) == (3.0, 11)
    assert line()["staleness_histogram"] == {}


@pytest.mark.parametrize("key", ["ess", "rejected_fraction", "kl_beta", "entropy_weight", "optimizer_steps"])
def test_the_numbers_of_an_update_are_there_or_null(key: str) -> None:
    """A batch that taught nothing has the same keys."""
    assert line(update=UPDATE)[key] == getattr(UPDATE, key)
    assert line()[key] is None


def test_it_says_how_the_batch_came_about() -> None:
    """What was refilled and replayed, what raised an alarm, and whether that took the policy back."""
    found = line(replaced=5, replayed=2, collapse_warnings=("entropy fell",), rolled_back=True)
    assert (found["groups_refilled"], found["groups_replayed"]) == (5, 2)
    assert (found["alarms"], found["rolled_back"]) == (["entropy fell"], True)
    plain = line()
    assert (plain["groups_refilled"], plain["groups_replayed"], plain["alarms"]) == (0, 0, [])
    assert plain["rolled_back"] is False


def sent_by(name: str, rewards: list[float], error: float | None) -> TrainedGroup:
    """A trained group from that environment, with completions of one and of two sampled tokens."""
    scored = scored_group([[1, 5], [2, 3]], rewards)
    first = replace(scored.group.completions[0], sampled=(True, False))
    prompt = replace(scored.group.prompt, source=name)
    group = replace(scored.group, prompt=prompt, completions=(first, scored.group.completions[1]))
    return TrainedGroup(scored=replace(scored, group=group, logprob_error=error), advantages=(-1.0, 1.0))


def test_it_says_what_each_environment_brought() -> None:
    """Also what ended while the batch was forming; lengths count what the policy drew, nothing else."""
    trained = (sent_by("a", [0.0, 1.0], 1e-7), sent_by("a", [1.0, 1.0], 2e-7), sent_by("b", [0.5, 0.5], None))
    found = line({("a", "invalid"): 7, ("c", "stale"): 1}, trained=trained, staleness=(0, 0, 0), update=UPDATE)
    assert (found["groups_discarded"], found["discarded"]) == (8, {"invalid": 7, "stale": 1})
    assert list(found["environments"]) == ["a", "b", "c"]
    assert found["environments"]["a"] == {
        "groups_trained": 2, "groups_discarded": 7, "discarded": {"invalid": 7}, "reward_mean": 0.75,
        "completion_tokens_mean": 1.5, "logprob_error_max": 2e-7,
    }  # fmt: skip
    assert found["environments"]["b"]["logprob_error_max"] is None
    assert found["environments"]["c"]["reward_mean"] is None
    assert found["completion_tokens"] == 9
    assert line()["environments"] == {}
