"""Histories of a run in columns, and the index of its groups."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attachments.dashboard import histories
from attachments.dashboard.histories import Evaluations, Groups, History, Metrics, Series, Timeline
from attachments.dashboard.run_files import TextSearch
from attachments.dashboard.tests.synthetic_run import RunShape, made_groups, write_run
from attachments.dashboard.tests.viewed_runs import lines
from training_run.directory.jsonl import encode

GROUP = {"group_id": 7, "step": 1, "outcome": "trained", "completions": []}


def read(history: History) -> dict[str, Any]:
    """Read a history to its end, and return the body of its response."""
    history.read_all()
    return history.body()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 90 groups."""
    return write_run(tmp_path_factory.mktemp("histories"), RunShape(groups=90, steps=6, token_steps=0))


def test_nested_values_become_columns_and_missing_values_null(tmp_path: Path) -> None:
    """Texts and lists are left out; True is 1."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines([{"step": 1, "a": {"b": {"c": 2.5}}, "text": "x", "list": [1]}, {"step": 2, "on": True}]))
    assert read(Series(path)) == {
        "columns": {"step": [1, 2], "a/b/c": [2.5, None], "on": [None, 1]}, "minima": {}, "maxima": {}, "marks": [],
        "lost_marks": 0, "damaged": 0,
    }  # fmt: skip


def test_the_metrics_mark_where_something_began(tmp_path: Path) -> None:
    """A finding that goes on has one mark; a finding that comes back has another one."""
    found = {"name": "no_reward", "severity": "error"}
    records = [{"step": step, "findings": [found] if step in (2, 3, 5) else []} for step in range(1, 6)]
    records[3] |= {"rolled_back": True}
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(records))
    history = Metrics(path)
    marks = [(mark["step"], mark["kind"], mark["name"]) for mark in read(history)["marks"]]
    assert marks == [(2, "finding", "no_reward"), (4, "rollback", ""), (5, "finding", "no_reward")]
    assert [mark["step"] for mark in history.body(2, 4)["marks"]] == [4]


def test_findings_that_have_ended_keep_their_texts(tmp_path: Path) -> None:
    """With the first and the last step of the last time; a finding that applies now is not among them."""
    found = {name: {"name": name, "fact": f"fact of {name}"} for name in ("slow", "truncated", "stale")}
    applies = {"truncated": (1, 3, 4), "stale": (2, 5), "slow": (6,)}
    records = [
        {"step": step, "findings": [found[name] for name, steps in applies.items() if step in steps]}
        for step in range(1, 7)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(records))
    history = Metrics(path)
    history.read_all()
    assert history.ended_findings() == [
        found["stale"] | {"first": 5, "last": 5},
        found["truncated"] | {"first": 3, "last": 4},
    ]


@pytest.mark.parametrize("is_repeated", [False, True], ids=["written once", "written in every line"])
def test_a_finding_that_goes_on_keeps_the_fields_that_its_later_lines_lack(tmp_path: Path, is_repeated: bool) -> None:
    """Later lines have its name and what changes. Lines with all fields have the same meaning."""
    begins = {"name": "slow", "severity": "warning", "fact": "12 s", "advice": "wait"}
    entries = [begins, {"name": "slow"}, {"name": "slow", "fact": "13 s"}, {"name": "slow"}]
    if is_repeated:
        entries = [begins, begins, begins | entries[2], begins | entries[2]]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines([{"step": step, "findings": [entry]} for step, entry in enumerate(entries, start=1)]))
    history = Metrics(path)
    history.read_all()
    assert history.latest["findings"] == [begins | {"fact": "13 s"}]
    path.write_bytes(path.read_bytes() + lines([{"step": 5, "findings": []}]))
    history.read_all()
    assert history.ended_findings() == [begins | {"fact": "13 s", "first": 1, "last": 4}]


def test_the_timeline_lists_the_swaps_of_all_lines(run: Path) -> None:
    """Texts of what the learner waits for are a column."""
    body = read(Timeline(run / "timeline.jsonl"))
    assert len(body["marks"]) == 6
    assert body["columns"]["queues/scored"][:3] == [1, 2, 0]
    assert set(body["columns"]["waiting"]) == {"", "5 of 8 groups have arrived; 6 are decoded, 1 is scored"}


def test_the_index_agrees_with_the_records(run: Path) -> None:
    """Outcome, rewards, lengths and versions of each group."""
    history = Groups(run / "rollouts.jsonl")
    columns = read(history)["columns"]
    records = list(made_groups(RunShape(groups=90, steps=6)))
    assert columns["group_id"] == [record["group_id"] for record in records]
    assert Counter(columns["outcome"]) == Counter(record["reason"] or "trained" for record in records)
    for row, record in enumerate(records):
        rewards = [one["reward"] for one in record["completions"] if one["reward"] is not None]
        assert columns["reward_spread"][row] == (max(rewards) - min(rewards) if rewards else None)
        assert columns["completions"][row] == len(record["completions"])
        assert columns["prompt"][row] == record["prompt"][:80]
        assert history.record(record["group_id"]) == encode(record)
    assert history.record(90) is None
    assert "offset" not in columns


def test_the_oldest_groups_are_dropped_beyond_the_limit_and_still_count(run: Path) -> None:
    """Memory is bounded; groups keep their numbers."""
    whole = Groups(run / "rollouts.jsonl")
    whole.read_all()
    history = Groups(run / "rollouts.jsonl", max_cells=15 * 40)
    body = read(history)
    assert history.end == 90
    assert body["dropped"] == 90 - len(body["columns"]["group_id"]) >= 50
    assert history.record(10) is None
    assert history.record(89) is not None
    assert history.body(88)["columns"]["group_id"] == [88, 89]
    assert history.outcomes == whole.outcomes == Counter(whole.column("outcome"))


def numbered(path: Path, count: int) -> Path:
    """Write `count` lines of metrics: a constant, a spike at step 5, and a group per step, discarded in every third."""
    records = [
        {
            "step": step, "time/run": 2.0 * step, "constant": 3, "value": 100.0 if step == 5 else float(step % 2),
            "groups/trained": int(step % 3 > 0), "groups/discarded_by_reason": {"stale": int(step % 3 == 0)},
        }
        for step in range(1, count + 1)
    ]  # fmt: skip
    path.write_bytes(lines(records))
    return path


def test_a_long_history_is_shown_from_its_beginning(tmp_path: Path) -> None:
    """Old rows are merged: means with their extremes, the last step and age; the newest rows are lines."""
    history = Metrics(numbered(tmp_path / "metrics.jsonl", 1000), max_rows=40)
    body = read(history)
    columns, counted = body["columns"], body["columns"]["lines"]
    rows = len(counted)
    assert 20 <= rows <= 40
    assert sum(counted) == history.end == 1000
    assert counted == sorted(counted, reverse=True)
    assert counted[-10:] == [1] * 10
    assert columns["step"] == [sum(counted[: row + 1]) for row in range(rows)]
    assert columns["time/run"] == [2 * step for step in columns["step"]]
    assert columns["constant"] == [3] * rows
    assert columns["value"][0] == pytest.approx((counted[0] // 2 - 1 + 100) / counted[0], rel=1e-4)
    assert (body["minima"]["value"][0], body["maxima"]["value"][0]) == (0, 100)
    assert body["maxima"]["value"][-1] is None
    assert "constant" not in body["minima"]


def test_numbers_have_five_significant_digits(tmp_path: Path) -> None:
    """Counts have all of theirs."""
    (tmp_path / "metrics.jsonl").write_bytes(lines([{"step": 1, "loss": 0.00123456789, "count": 123456}]))
    columns = read(Metrics(tmp_path / "metrics.jsonl"))["columns"]
    assert (columns["loss"], columns["count"]) == ([0.0012346], [123456])


def test_the_outcomes_of_all_steps_are_counted(tmp_path: Path) -> None:
    """However long the run is."""
    history = Metrics(numbered(tmp_path / "metrics.jsonl", 1000), max_rows=40)
    history.read_all()
    assert history.outcomes == {"trained": 667, "stale": 333}


@pytest.mark.parametrize(("low", "high"), [(1, 30), (480, 520), (990, 1000), (700, 700)])
def test_a_range_has_every_line(tmp_path: Path, low: int, high: int) -> None:
    """It begins and ends with whole rows of the thinned history."""
    history = Metrics(numbered(tmp_path / "metrics.jsonl", 1000), max_rows=400)
    history.read_all()
    body = history.detail(low, high)
    steps = body["columns"]["step"]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[0] <= low <= high <= steps[-1]
    assert body["columns"]["value"] == [100 if step == 5 else step % 2 for step in steps]
    assert history.detail(2000, 3000)["columns"] == {}


def test_a_range_that_is_too_long_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own number of lines; or, if reading it would take long, as the whole history."""
    history = Metrics(numbered(tmp_path / "metrics.jsonl", 1000), max_rows=40)
    body = read(history)
    assert max(history.detail(1, 100)["columns"]["lines"]) < max(body["columns"]["lines"])
    monkeypatch.setattr(histories, "MAX_DETAIL_BYTES", 100)
    assert history.detail(0, 1000)["columns"] == body["columns"]
    steps = body["columns"]["step"]
    assert history.detail(steps[5], steps[7])["columns"]["step"] == steps[5:8]


def test_every_row_of_a_thinned_history_is_in_one_part(tmp_path: Path) -> None:
    """Parts are given by numbers of lines; a stream continues with them."""
    history = Metrics(numbered(tmp_path / "metrics.jsonl", 1000), max_rows=40)
    body = read(history)
    parts = [history.body(start, start + 7)["columns"].get("step", []) for start in range(0, 1000, 7)]
    assert [step for part in parts for step in part] == body["columns"]["step"]


def test_a_long_timeline_keeps_the_sums_of_times_and_all_swaps(tmp_path: Path) -> None:
    """As the lines of timeline.jsonl are merged; what the learner waited for last is a text."""
    path = tmp_path / "timeline.jsonl"
    path.write_bytes(
        lines([{"t": t, "decode": 0.5, "rows": 8, "swaps": [t - 0.5], "waiting": f"{t}"} for t in range(1, 201)])
    )
    body = read(Timeline(path, max_rows=20))
    columns = body["columns"]
    assert sum(columns["decode"]) == 100
    assert columns["waiting"] == [f"{t}" for t in columns["t"]]
    assert body["marks"] == [t - 0.5 for t in range(1, 201)]


def test_marks_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says how many it does not show."""
    monkeypatch.setattr(histories, "MAX_MARKS", 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines([{"step": step, "rolled_back": True} for step in range(5)]))
    body = read(Metrics(path))
    assert ([mark["step"] for mark in body["marks"]], body["lost_marks"]) == ([2, 3, 4], 2)


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    """Everything else is read."""
    path = tmp_path / "rollouts.jsonl"
    damaged = [
        b"{", b"[1]", b'{"group_id": "x", "step": 1}', b'{"step": 1}', b"\0\0\0",
        b'{"group_id": 1, "step": 1, "x": "\xff"}',
    ]  # fmt: skip
    path.write_bytes(b"\n".join([*damaged, encode(GROUP), b""]))
    body = read(Groups(path))
    assert body["damaged"] == len(damaged)
    assert body["columns"]["group_id"] == [7]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["group_id", "step", "t", "swaps", "findings", "completions", "reward", "prompt", "x"])
DAMAGED = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(KEYS, JSON_VALUES, max_size=5).map(lambda record: encode(record)),
    st.tuples(st.just(encode(GROUP)), st.integers(0, 60), st.binary(max_size=3)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
    ),
    st.just(b'{"step": ' + b"[" * 2000),
    st.just(b'{"step": 1' + b"0" * 400 + b', "t": 1e999}'),
)


def check(directory: Path, damaged: list[bytes]) -> None:
    """Read a file with these lines as each history: it is read to its end, and its body is JSON."""
    path = directory / "lines"
    path.write_bytes(b"\n".join([*damaged, encode(GROUP | {"t": 1.0}), b""]))
    for history in (Series(path), Metrics(path), Evaluations(path), Timeline(path, max_rows=2), Groups(path)):
        body = msgspec.json.decode(msgspec.json.encode(read(history)))
        lengths = {len(values) for values in body["columns"].values()}
        assert lengths == {len(body["columns"]["step"])} or isinstance(history, Timeline)
        assert sum(body["columns"].get("lines", [1] * lengths.pop())) == history.end
        assert body["columns"]["step"][-1] == 1
        if isinstance(history, Groups):
            search = TextSearch(history)
            while search.advance("x"):
                pass
            assert set(search.group_ids("x")) <= set(body["columns"]["group_id"])


@settings(max_examples=40)
@example([b'{"t": 1, "swaps": 1, "waiting": 1}'])
@given(st.lists(DAMAGED, max_size=4))
def test_any_damaged_file_is_read(tmp_path_factory: pytest.TempPathFactory, damaged: list[bytes]) -> None:
    """Bytes, values of other types, deep nesting, and numbers beyond every range."""
    check(tmp_path_factory.getbasetemp(), damaged)


@pytest.mark.slow
@settings(settings.get_profile("many"))
@given(st.lists(DAMAGED, max_size=8))
def test_very_many_damaged_files_are_read(tmp_path_factory: pytest.TempPathFactory, damaged: list[bytes]) -> None:
    """As above."""
    check(tmp_path_factory.getbasetemp(), damaged)
