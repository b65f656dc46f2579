"""Metrics: the lines of metrics.jsonl and evaluations.jsonl, and their description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from protocols.errors import RunDirectoryError
from protocols.finding import CHECK, Finding
from protocols.rollout import Discarded
from protocols.step import StepReport, TrainedGroup, UpdateMetrics
from protocols.summary import RunGauges
from tests.training.policies_and_groups import scored_group
from tests.training_run.records.display_examples import MEASURES, completion, discarded, evaluation, ungraded_evaluation
from training_run.records.evaluation_history import EVALUATION_METRICS, read_history
from training_run.records.metrics import (
    ATTACHED_METRICS,
    ENVIRONMENT_METRICS,
    UPDATE_METRICS,
    Measurement,
    all_metrics,
    reward_parts,
    step_metrics,
)

UPDATE = UpdateMetrics(
    loss=-0.01, kl=0.002, entropy=0.7, clip_fraction=0.01, mismatch_kl=1e-6, ratio_mean=1.0, grad_norm=0.3,
    learning_rate=1e-5, trained_tokens=6, update_applied=True, ess=0.9, rejected_fraction=0.05, kl_beta=0.02,
    entropy_coef=1e-3,
    optimizer_steps=4,
)  # fmt: skip
EMPTY = StepReport(
    step=3, version=2, fingerprint="f", trained=(), discarded=(), staleness=(), update=None, train_seconds=0.0,
    wait_seconds=0.0,
)  # fmt: skip


def line(discarded_between: Mapping[tuple[str, str], int] = {}, **changes: Any) -> dict[str, Any]:
    """Return the line of metrics.jsonl for a report."""
    moment = Measurement(seconds=1.0, gauges=RunGauges())
    report = msgspec.structs.replace(EMPTY, **changes)
    record = step_metrics(report, now=moment, before=moment, discarded_between=discarded_between)
    return dict(json.loads(msgspec.json.encode(record)))


def test_the_histogram_counts_trained_groups_by_staleness() -> None:
    """In ascending order; empty without trained groups."""
    group = TrainedGroup(scored=scored_group([[1], [2]], [0.0, 1.0]), advantages=(-1.0, 1.0))
    found = line(trained=(group,) * 5, staleness=(2, 0, 0, 11, 2), update=UPDATE)
    assert list(found["staleness/histogram"].items()) == [("0", 2), ("2", 2), ("11", 1)]
    assert (found["staleness/mean"], found["staleness/max"]) == (3.0, 11)
    assert line()["staleness/histogram"] == {}


def test_a_line_has_the_shares_of_groups_that_all_none_or_some_completions_solve() -> None:
    """Of all scored groups: trained on, discarded, and discarded between two steps. Null without one."""
    names = ["groups/solved_all", "groups/solved_none", "groups/mixed"]
    group = TrainedGroup(scored=scored_group([[1], [2]], [0.0, 1.0]), advantages=(-1.0, 1.0))
    moment = Measurement(seconds=1.0, gauges=RunGauges())
    report = replace(EMPTY, trained=(group,), discarded=(replace(discarded(), rewards=(1.0, 1.0)),))
    found = step_metrics(report, now=moment, before=moment, solved_between={"none": 2})
    assert [found[name] for name in names] == [0.25, 0.5, 0.25]
    assert [line()[name] for name in names] == [None] * 3


def test_the_length_of_completions_that_ended_is_a_metric() -> None:
    """Those that reached a limit do not count."""
    ended, cut = completion(tokens=5), completion(tokens=9, finish="length")
    found = line(discarded=(replace(discarded(), completions=(ended, cut, cut)),))
    assert (found["completion_length/terminated"], found["truncated_fraction"]) == (5.0, 2 / 3)


def test_the_metrics_of_attachments_are_in_every_line() -> None:
    """Null in a step of which nothing returns them."""
    hooked, measured, *_ = ATTACHED_METRICS()
    now = Measurement(seconds=1.0, gauges=RunGauges())
    report = replace(EMPTY, metrics={hooked: {"a": 0.5}})
    found = step_metrics(report, now=now, before=now, measured={measured: 2})
    assert (found[hooked], found[measured]) == ({"a": 0.5}, 2)
    assert all(line()[other] is None for other in ATTACHED_METRICS())


def test_every_key_is_described_and_every_description_has_a_key() -> None:
    """Also for batches without an update, whose update metrics are null."""
    assert line(update=UPDATE).keys() == line().keys() == all_metrics().keys()
    assert all(line()[name] is None for name in UPDATE_METRICS)


def test_a_line_has_the_replaced_groups_and_whether_the_policy_was_rolled_back() -> None:
    """0 and false in a usual step."""
    found = line(replaced=5, rolled_back=True)
    assert (found["groups/replaced"], found["rolled_back"]) == (5, True)
    plain = line()
    assert (plain["groups/replaced"], plain["rolled_back"]) == (0, False)


def test_a_line_has_the_findings_of_the_gauges() -> None:
    """A finding with all its parts, in the order of its fields."""
    finding = Finding(name="slow", severity="warning", fact="f", consequence="c", advice="a", remedy=CHECK)
    before = Measurement(seconds=0.5, gauges=RunGauges())
    now = Measurement(seconds=1.0, gauges=RunGauges(findings=(finding,)))
    found = json.loads(msgspec.json.encode(step_metrics(EMPTY, now=now, before=before)))
    (written,) = found["findings"]
    assert list(written) == list(Finding.__struct_fields__)


def test_the_text_of_a_finding_is_written_when_it_begins_or_changes() -> None:
    """Other lines have its name. A finding that comes back begins again."""
    slow = Finding(name="slow", severity="warning", fact="12 s", consequence="c", advice="a", remedy=CHECK)
    slower = msgspec.structs.replace(slow, fact="13 s")
    full = Finding(name="scorer_full", severity="warning", fact="f", consequence="c", advice="a", remedy=CHECK)
    every = [(), (slow,), (slow,), (slower, full), (full,), (slower, full)]
    moments = [Measurement(seconds=1.0, gauges=RunGauges(findings=findings)) for findings in every]
    written = [step_metrics(EMPTY, now=now, before=before)["findings"] for before, now in pairwise(moments)]
    all_of = {finding.fact: msgspec.structs.asdict(finding) for finding in (slow, slower, full)}
    assert written == [
        [all_of["12 s"]],
        [{"name": "slow"}],
        [{"name": "slow", "fact": "13 s"}, all_of["f"]],
        [{"name": "scorer_full"}],
        [all_of["13 s"], {"name": "scorer_full"}],
    ]


def test_values_that_an_update_did_not_compute_are_null() -> None:
    """KL without a penalty, the mismatch without tokens of the current version, and the loss without a teacher."""
    group = TrainedGroup(scored=scored_group([[1], [2]], [0.0, 1.0]), advantages=(-1.0, 1.0))
    version = group.scored.group.completions[0].versions[-1]
    plain = msgspec.structs.replace(UPDATE, kl=0.0, kl_beta=0.0)
    on_policy = line(trained=(group,), staleness=(0,), update=plain, version=version + 1)
    stale = line(trained=(group,), staleness=(1,), update=plain, version=version + 2)
    assert [on_policy[name] for name in ("kl", "mismatch_kl", "distillation_loss")] == [None, 1e-6, None]
    assert stale["mismatch_kl"] is None
    assert line(trained=(group,), staleness=(0,), update=UPDATE)["kl"] == 0.002


def test_the_failures_of_a_reward_function_are_counted() -> None:
    """By function, in groups. A function without any value has no mean."""
    scored = scored_group([[1], [2]], [0.0, 1.0])
    failed = Discarded(prompt=scored.group.prompt, reason="reward_error", detail="", failed_rewards=("a", "b"))
    trained = (TrainedGroup(scored=replace(scored, parts={"a": (0.0, 1.0)}), advantages=(-1.0, 1.0)),)
    report = msgspec.structs.replace(EMPTY, trained=trained, staleness=(0,), discarded=(failed,), update=UPDATE)
    assert reward_parts(report, {"b": 2}) == {
        "a": {"mean": 0.5, "std": 0.5, "count": 2, "failures": 1},
        "b": {"mean": None, "std": None, "count": 0, "failures": 3},
    }


def sent_by(name: str, rewards: list[float], error: float | None) -> TrainedGroup:
    """Return a trained group of an environment, with completions of one and of two sampled tokens."""
    scored = scored_group([[1, 5], [2, 3]], rewards)
    first = replace(scored.group.completions[0], sampled=(True, False))
    prompt = replace(scored.group.prompt, source=name)
    group = replace(scored.group, prompt=prompt, completions=(first, scored.group.completions[1]))
    return TrainedGroup(scored=replace(scored, group=group, logprob_error=error), advantages=(-1.0, 1.0))


def test_a_line_has_the_metrics_of_each_environment() -> None:
    """Also groups discarded between two batches. Lengths count sampled tokens only."""
    trained = (sent_by("a", [0.0, 1.0], 1e-7), sent_by("a", [1.0, 1.0], 2e-7), sent_by("b", [0.5, 0.5], None))
    found = line({("a", "invalid"): 7, ("c", "stale"): 1}, trained=trained, staleness=(0, 0, 0), update=UPDATE)
    assert (found["groups/discarded"], found["groups/discarded_by_reason"]) == (8, {"invalid": 7, "stale": 1})
    assert list(found["environments"]) == ["a", "b", "c"]
    assert found["environments"]["a"] == {
        "groups/trained": 2, "groups/discarded": 7, "groups/discarded_by_reason": {"invalid": 7}, "reward/mean": 0.75,
        "completion_length/mean": 1.5, "logprob_error_max": 2e-7,
    }  # fmt: skip
    assert found["environments"]["b"]["logprob_error_max"] is None
    assert found["environments"]["c"]["reward/mean"] is None
    assert found["completion_length/total"] == 9
    assert line()["environments"] == {}


def test_huge_rewards_of_discarded_groups_are_not_averaged() -> None:
    """Their sum would overflow, and the display of the run would end."""
    group = replace(scored_group([[1], [2]], [1e308, 1e308]))
    refused = Discarded(
        prompt=group.group.prompt,
        reason="invalid",
        detail="a reward is too large",
        completions=group.group.completions,
        rewards=group.rewards,
    )
    trained = (TrainedGroup(scored=scored_group([[1], [2]], [0.0, 1.0]), advantages=(-1.0, 1.0)),)
    found = line(trained=trained, discarded=(refused,), staleness=(0,), update=UPDATE)
    assert (found["reward/mean"], found["reward/std"]) == (0.5, 0.5)


def test_every_environment_metric_is_described() -> None:
    """The table has exactly the keys of an entry."""
    found = line(trained=(sent_by("a", [0.0, 1.0], None),), staleness=(0,), update=UPDATE)
    assert found["environments"]["a"].keys() == ENVIRONMENT_METRICS.keys()


def test_every_key_of_an_evaluation_is_described() -> None:
    """The table has exactly the keys of a line."""
    record = json.loads(msgspec.json.encode(evaluation(3, 0.5)))
    assert record.keys() == EVALUATION_METRICS.keys()


def test_the_history_of_a_run_is_read_from_its_files(tmp_path: Path) -> None:
    """Age, first evaluation and latest final evaluation; missing files mean a new run."""
    metrics, evaluations = tmp_path / "metrics.jsonl", tmp_path / "evaluations.jsonl"
    empty = read_history(metrics, evaluations)
    assert (empty.seconds, empty.before, empty.after) == (0.0, None, None)
    measured = msgspec.structs.replace(evaluation(9, 0.4, final=True), **MEASURES, ungraded=2, failed=1)
    reports = [evaluation(0, 0.1), ungraded_evaluation(5), evaluation(8, 0.3, final=True), measured]
    lines = list(map(msgspec.json.encode, reports))
    evaluations.write_bytes(b"\n".join(lines) + b"\n")
    metrics.write_text('{"step": 1, "time/run": 7.5}\n')
    history = read_history(metrics, evaluations)
    assert (history.seconds, history.before, history.after) == (7.5, reports[0], reports[3])
    assert list(history.evaluations) == reports
    metrics.write_text('{"step": 1, "time/run": "long"}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl or evaluations.jsonl is not valid"):
        read_history(metrics, evaluations)
