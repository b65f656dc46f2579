"""Histories of a run in columns, and the index of its groups."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clotho.dashboard.histories import Groups, History, Metrics, Timeline
from clotho.dashboard.text_search import TextSearch
from clotho.storage.jsonl import encode
from tests.dashboard.synthetic_run import RunShape, made_groups, write_run
from tests.dashboard.viewed_runs import lines

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
    assert read(History(path)) == {
        "columns": {"step": [1, 2], "a/b/c": [2.5, None], "on": [None, 1]},
        "damaged": 0,
        "dropped": 0,
    }


def test_the_metrics_mark_where_something_began(tmp_path: Path) -> None:
    """A finding that goes on has one mark; a finding that comes back has another one."""
    found = {"name": "no_reward", "severity": "error"}
    records = [{"step": step, "findings": [found] if step in (2, 3, 5) else []} for step in range(1, 6)]
    records[3] |= {"rolled_back": True}
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(records))
    history = Metrics(path)
    marks = [(mark["step"], mark["kind"], mark["name"]) for mark in read(history)["marks"]]
    assert marks == [
        (2, "finding", "no_reward"),
        (4, "rollback", ""),
        (5, "finding", "no_reward"),
    ]
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
    assert len(body["swaps"]) == 6
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


def test_the_oldest_rows_are_dropped_beyond_the_limit(run: Path) -> None:
    """Memory is bounded; rows keep their numbers."""
    history = Groups(run / "rollouts.jsonl", max_cells=15 * 40)
    body = read(history)
    assert history.end == 90
    assert body["dropped"] == 90 - len(body["columns"]["group_id"]) >= 50
    assert history.record(10) is None
    assert history.record(89) is not None
    assert history.body(88)["columns"]["group_id"] == [88, 89]


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    """Everything else is read."""
    path = tmp_path / "rollouts.jsonl"
    damaged = [
        b"{",
        b"[1]",
        b'{"group_id": "x", "step": 1}',
        b'{"step": 1}',
        b"\0\0\0",
        b'{"group_id": 1, "step": 1, "x": "\xff"}',
    ]
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
    for history in (History(path), Metrics(path), Timeline(path), Groups(path)):
        body = msgspec.json.decode(msgspec.json.encode(read(history)))
        lengths = {len(values) for values in body["columns"].values()}
        assert lengths == {history.end}
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
