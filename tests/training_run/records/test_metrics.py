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
from protocols.summary import (
    Distribution,
    RankGauge,
    RankGauges,
    RemoteGauges,
    RemoteServerGauge,
    ResourceReading,
    RunGauges,
    SpeculationCounts,
)
from tests.training.policies_and_groups import scored_group
from tests.training_run.records.display_examples import MEASURES, evaluation, ungraded_evaluation
from training_run.attachment import attached_metrics
from training_run.records.evaluation_history import EVALUATION_METRICS, evaluation_record, read_history
from training_run.records.metrics import (
    ENVIRONMENT_METRICS,
    RANK_METRICS,
    REMOTE_METRICS,
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


def test_speculation_is_counted_since_the_line_before() -> None:
    """The engine counts since it was created."""
    counts = [
        SpeculationCounts(passes=passes, draft_tokens=drafted, accepted_by_position=accepted)
        for passes, drafted, accepted in ((4, 10, (3, 1)), (9, 25, (8, 5)))
    ]
    before, now = (Measurement(seconds=1.0, gauges=RunGauges(speculation=one)) for one in counts)
    found = step_metrics(EMPTY, now=now, before=before)
    names = ("passes", "draft_tokens", "accepted_tokens")
    assert [found[f"speculation/{name}"] for name in names] == [5, 15, 9]


def test_the_metrics_of_attachments_are_in_every_line() -> None:
    """Null in a step of which no hook returns them."""
    name = next(iter(attached_metrics()))
    assert line(metrics={name: {"a": 0.5}})[name] == {"a": 0.5}
    assert all(line()[other] is None for other in attached_metrics())


def test_every_key_is_described_and_every_description_has_a_key() -> None:
    """Also for batches without an update, whose update metrics are null."""
    assert line(update=UPDATE).keys() == line().keys() == all_metrics().keys()
    assert all(line()[name] is None for name in UPDATE_METRICS)


def test_the_metrics_of_the_update_are_written_unchanged() -> None:
    """Each value of the update appears in the line."""
    found = line(update=UPDATE)
    assert [found[name] for name in UPDATE_METRICS if name in ("loss", "ess", "update_applied")] == [-0.01, True, 0.9]


def test_a_line_has_the_replaced_groups_and_whether_the_policy_was_rolled_back() -> None:
    """0 and false in a usual step."""
    found = line(replaced=5, rolled_back=True)
    assert (found["groups/replaced"], found["rolled_back"]) == (5, True)
    plain = line()
    assert (plain["groups/replaced"], plain["rolled_back"]) == (0, False)


def test_a_line_has_the_findings_and_the_resources_of_the_gauges() -> None:
    """A finding with all its parts, in the order of its fields. Unknown resources are null."""
    finding = Finding(name="slow", severity="warning", fact="f", consequence="c", advice="a", remedy=CHECK)
    resources = ResourceReading(resident_bytes=5, cpu_share=1.5, swap_change_bytes=-3)
    before = Measurement(seconds=0.5, gauges=RunGauges())
    now = Measurement(seconds=1.0, gauges=RunGauges(findings=(finding,), resources=resources))
    found = json.loads(msgspec.json.encode(step_metrics(EMPTY, now=now, before=before)))
    (written,) = found["findings"]
    assert list(written) == list(Finding.__struct_fields__)
    assert [found[f"resources/{name}"] for name in ("resident_bytes", "cpu_share", "swap_change_bytes")] == [5, 1.5, -3]
    assert found["resources/gpu_share"] is None


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


def test_the_state_of_each_remote_server_is_part_of_the_line() -> None:
    """By address, with the keys of the table. The rate is that of the tokens since the line before."""
    server = RemoteServerGauge(
        name="http://a:1", state="ready", version=6, lag=1, rows=8, groups=21, tokens=900, failures=3, restarts=2,
        bytes_sent=5000, bytes_received=700, push_seconds=0.02, pushes=Distribution(bounds=(), counts=(1,), total=0.02),
    )  # fmt: skip
    before, now = (
        Measurement(seconds=seconds, gauges=RunGauges(remote=RemoteGauges(servers=(one,))))
        for seconds, one in ((1.0, replace(server, tokens=400)), (3.0, server))
    )
    found = json.loads(msgspec.json.encode(step_metrics(EMPTY, now=now, before=before)))["remote_servers"]
    assert found == {
        "http://a:1": {
            "state": "ready", "version": 6, "lag": 1, "rows": 8, "groups": 21, "tokens_per_second": 250.0,
            "failures": 3, "restarts": 2, "bytes_sent": 5000, "bytes_received": 700, "push_seconds": 0.02,
        }
    }  # fmt: skip
    assert found["http://a:1"].keys() == REMOTE_METRICS.keys()


def test_the_work_of_each_rank_is_part_of_the_line() -> None:
    """Since the line before, with the keys of the table; nothing without other ranks."""
    one = RankGauge(name="0", positions=900, seconds=3.0, bytes_sent=0)
    other = RankGauge(name="1", positions=300, seconds=2.0, bytes_sent=70)
    before = RankGauges(waited_seconds=1.5, ranks=(replace(one, positions=400, seconds=1.0), other))
    now = RankGauges(waited_seconds=1.75, ranks=(one, replace(other, bytes_sent=100)))
    started, ended, nothing = (
        Measurement(seconds=0.0, gauges=RunGauges(learner_ranks=found)) for found in (before, now, RankGauges())
    )
    found = step_metrics(EMPTY, now=ended, before=started)
    assert found["learner_ranks"] == {
        "0": {"positions": 500, "seconds": 2.0, "positions_per_second": 250.0, "bytes_sent": 0},
        "1": {"positions": 0, "seconds": 0.0, "positions_per_second": None, "bytes_sent": 30},
    }
    assert found["learner_ranks"]["0"].keys() == RANK_METRICS.keys()
    assert found["time/wait_for_ranks"] == 0.25
    alone = step_metrics(EMPTY, now=nothing, before=nothing)
    assert (alone["learner_ranks"], alone["time/wait_for_ranks"]) == ({}, None)


def test_every_key_of_an_evaluation_is_described() -> None:
    """The table has exactly the keys of a line."""
    record = json.loads(msgspec.json.encode(evaluation_record(evaluation(3, 0.5), run_seconds=1.0)))
    assert record.keys() == EVALUATION_METRICS.keys()


def test_the_history_of_a_run_is_read_from_its_files(tmp_path: Path) -> None:
    """Age, first evaluation and latest final evaluation; missing files mean a new run."""
    metrics, evaluations = tmp_path / "metrics.jsonl", tmp_path / "evaluations.jsonl"
    empty = read_history(metrics, evaluations)
    assert (empty.seconds, empty.before, empty.after) == (0.0, None, None)
    measured = msgspec.structs.replace(evaluation(9, 0.4, final=True), measures=MEASURES, ungraded=2, failed=1)
    reports = [evaluation(0, 0.1), ungraded_evaluation(5), evaluation(8, 0.3, final=True), measured]
    lines = [msgspec.json.encode(evaluation_record(report, run_seconds=2.0)) for report in reports]
    evaluations.write_bytes(b"\n".join(lines) + b"\n")
    metrics.write_text('{"step": 1, "time/run": 7.5}\n')
    history = read_history(metrics, evaluations)
    assert (history.seconds, history.before, history.after) == (7.5, reports[0], reports[3])
    assert list(history.evaluations) == reports
    metrics.write_text('{"step": 1, "time/run": "long"}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl or evaluations.jsonl is not valid"):
        read_history(metrics, evaluations)
