"""The overview of a run is complete for any contents of its files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attachments.dashboard import run_files
from attachments.dashboard.histories import Groups, Metrics
from attachments.dashboard.overview import OUTCOMES, state
from attachments.dashboard.run_files import RunFiles
from attachments.dashboard.tests.synthetic_run import RunShape, made_groups, made_metrics, write_run
from attachments.dashboard.tests.test_histories import JSON_VALUES
from protocols.rollout import DiscardReason
from training_run.directory.jsonl import encode
from training_run.records.forecast import STEP_METRICS
from training_run.records.metrics import all_metrics

KEYS = st.sampled_from([
    *STEP_METRICS.values(), "step", "policy_version", "findings", "problems", "ungraded", "time/evaluation", "accuracy",
    "t", "waiting", "groups", "groups/discarded_by_reason", "group_id", "outcome", "steps", "eval",
])  # fmt: skip
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, 2**53, -(2**70), 1e308, -1e308])
RECORDS = st.lists(st.dictionaries(KEYS, NUMBERS | JSON_VALUES, max_size=8), max_size=3)


def read(directory: Path, *, is_live: bool = True) -> dict[str, Any]:
    """Return the state of a run as JSON."""
    files = RunFiles(directory)
    for history in files.histories.values():
        history.read_all()
    found: dict[str, Any] = msgspec.json.decode(encode(state(files, is_live=is_live)))
    return found


def test_every_outcome_is_described() -> None:
    """Beside its bar."""
    assert set(OUTCOMES) == {"trained", *get_args(DiscardReason)}


def test_made_up_metrics_have_the_keys_of_a_run() -> None:
    """The tests of the dashboard use them."""
    made = made_metrics(RunShape(groups=4, steps=2), list(made_groups(RunShape(groups=4, steps=2))))
    assert {tuple(sorted(line)) for line in made} == {tuple(sorted(all_metrics()))}


def test_without_rollouts_the_outcomes_follow_from_the_metrics(tmp_path: Path) -> None:
    """With `monitor.rollouts = false`."""
    run = write_run(tmp_path, RunShape(groups=36, steps=4, token_steps=0))
    outcomes = read(run)["outcomes"]
    (run / "rollouts.jsonl").unlink()
    assert read(run)["outcomes"] == outcomes


def test_outcomes_and_progress_of_a_long_run_are_those_of_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the metrics are thinned, and the oldest groups are not listed."""
    run = write_run(tmp_path, RunShape(groups=180, steps=90, token_steps=0))
    whole = read(run)
    monkeypatch.setattr(run_files, "Metrics", partial(Metrics, max_rows=70))
    monkeypatch.setattr(run_files, "Groups", partial(Groups, max_cells=15 * 40))
    limited = RunFiles(run)
    for history in limited.histories.values():
        history.read_all()
    assert len(limited.metrics.body()["columns"]["step"]) < 90
    assert limited.groups.first > 100
    assert read(run) == whole
    assert sum(whole["outcomes"].values()) == 180
    assert whole["seconds_left"] is not None


@settings(max_examples=30)
@given(RECORDS, RECORDS, RECORDS, JSON_VALUES)
def test_any_contents_have_an_overview(
    tmp_path_factory: pytest.TempPathFactory,
    metrics: list[Any],
    evaluations: list[Any],
    timeline: list[Any],
    value: Any,
) -> None:
    """Values of other types, and numbers beyond every range."""
    directory = tmp_path_factory.getbasetemp() / "overview"
    directory.mkdir(exist_ok=True)
    for name, records in (("metrics", metrics), ("evaluations", evaluations), ("timeline", timeline)):
        (directory / f"{name}.jsonl").write_bytes(b"".join(encode(record) + b"\n" for record in records))
    (directory / "preflight.json").write_bytes(encode(value))
    (directory / "profile.toml").write_text('steps = 5\neval = { type = "heldout", interval = 2 }\n')
    assert read(directory).keys() >= {"step", "seconds", "seconds_left", "outcomes", "findings"}
