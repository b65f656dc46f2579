"""A complete run of `python pipeline.py`: its output and its files."""

from __future__ import annotations

import json
import re
import tomllib

from tests.e2e.conftest import HELD_OUT, CompletedRun
from tests.e2e.pipeline_process import BATCH, assert_recorded, lines, metrics
from training_run.records.display import LABEL_WIDTH
from training_run.records.metrics import all_metrics

ABOUT_THE_MACHINE = {"slow", "memory_pressure", "swap_growing", "thermal_pressure", "low_power_mode", "on_battery"}


def test_a_run_prints_its_machine_addresses_and_result(finished: CompletedRun) -> None:
    """Machine, backend, BLAS, policy, address, table and group accounting, as plain lines if redirected."""
    out = finished.result.out.replace(f"\n{' ' * LABEL_WIDTH}", " ")
    assert re.search(r"^machine  .*MLX \d.* on (CPU|GPU|METAL|CUDA)", out, re.M | re.I)
    assert re.search(r"^compute  \S", out, re.M)
    assert re.search(r"^policy   .*qwen3, 493k parameters.* trained", out, re.M)
    assert re.search(r"^memory   about \d+ MiB \(estimate", out, re.M)
    assert re.search(r"^API      http://127\.0\.0\.1:\d+/v1$", out, re.M)
    assert re.search(r"^page     http://127\.0\.0\.1:\d+/$", out, re.M)
    assert re.search(rf"^step 0/6  held-out accuracy +[\d.]+ % of {HELD_OUT}", out, re.M)
    assert re.search(r"before \(step 0\).*after \(step 6\)", out)
    assert "\x1b" not in out
    assert "\r" not in out
    assert finished.result.err == ""


def test_every_prompted_group_ends_once_and_is_logged(finished: CompletedRun) -> None:
    """The group accounting, metrics.jsonl and rollouts.jsonl agree."""
    accounting = finished.result.accounting
    assert (accounting.prompted, accounting.carried_over) == (finished.steps * BATCH, 0)
    assert_recorded(finished.run_dir, accounting, steps=finished.steps)


def test_metrics_and_evaluations_cover_all_steps(finished: CompletedRun) -> None:
    """evaluations.jsonl has step 0 (the base policy) and the last step. metrics.jsonl has one line per step."""
    recorded, evaluations = metrics(finished.run_dir), lines(finished.run_dir / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, finished.steps]
    assert [line["step"] for line in recorded] == list(range(1, finished.steps + 1))
    for line in evaluations:
        for share in (line["accuracy"], line["avg_at_k"]["value"], line["pass_at"]["2"]["value"]):
            assert 0.0 <= share <= 1.0
        assert line["avg_at_k"]["value"] <= line["pass_at"]["2"]["value"]
        assert line["reward"]["low"] < line["reward"]["value"] < line["reward"]["high"]
        assert (line["samples"], line["failed"], line["loss"], line["reward"]["problems"]) == (2, 0, None, HELD_OUT)
        assert set(line["rewards"]) == {"format", "math_eval", "choice_correctness"}
    for line in metrics(finished.run_dir):
        assert line.keys() == all_metrics().keys()


def test_a_healthy_run_has_no_finding(finished: CompletedRun) -> None:
    """Except those about the machine, which other programs use too. The last line has the resources of the process."""
    recorded = metrics(finished.run_dir)
    assert {found["name"] for line in recorded for found in line["findings"]} <= ABOUT_THE_MACHINE
    assert recorded[-1]["resources/resident_bytes"] > 2**20


def test_a_run_leaves_profile_log_checkpoints_and_adapter(finished: CompletedRun) -> None:
    """No other files and no partial files."""
    run_dir = finished.run_dir
    entries = {entry.name for entry in run_dir.iterdir()} - {".lock", ".run_id", ".newest_checkpoint"}
    assert entries == {
        "profile.toml",
        "best.json",
        "metrics.jsonl",
        "evaluations.jsonl",
        "rollouts.jsonl",
        "log.jsonl",
        "timeline.jsonl",
        "facts.json",
        "preflight.json",
        "checkpoints",
        "adapters",
        "tokens",
    }
    assert tomllib.loads((run_dir / "profile.toml").read_text())["steps"] == finished.steps
    assert [line["step"] for line in lines(run_dir / "log.jsonl") if line["event"] == "checkpoint_written"] == [2, 4, 6]
    for step in (2, 4, 6):
        names = {entry.name for entry in (run_dir / "checkpoints" / f"step-{step:06d}").iterdir()}
        assert names >= {"adapters.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"}
        assert {"MANIFEST.json", "profile.toml", "metrics.json"} <= names
    assert json.loads((run_dir / "adapters" / "adapter_config.json").read_text())["fine_tune_type"] == "lora"
    final = (run_dir / "checkpoints" / "step-000006" / "adapters.safetensors").read_bytes()
    assert (run_dir / "adapters" / "adapters.safetensors").read_bytes() == final


def test_the_timeline_accounts_for_the_compute_thread(finished: CompletedRun) -> None:
    """It has every weight swap, and ends with the last step, when no group is in flight."""
    timeline, recorded = lines(finished.run_dir / "timeline.jsonl"), metrics(finished.run_dir)
    times = [line["t"] for line in timeline]
    assert times == sorted(times)
    assert sum(line["decode"] for line in timeline) >= sum(line["time/decode"] for line in recorded) - 1e-3
    assert sum(line["learn"] for line in timeline) > 0
    assert len([time for line in timeline for time in line["swaps"]]) == recorded[-1]["policy_version"]
    last = timeline[-1]
    assert (last["step"], last["version"]) == (finished.steps, recorded[-1]["policy_version"])
    assert set(last["groups"].values()) == {0}


def test_a_synchronous_run_samples_with_the_newest_weights(synchronous: CompletedRun) -> None:
    """`--async false`: the staleness is 0 in every update, and the groups of step s are sampled after update s - 1."""
    recorded = metrics(synchronous.run_dir)
    assert all(line["staleness/max"] in (0, None) for line in recorded)
    assert any(line["staleness/max"] == 0 for line in recorded)
    versions = {0: 0} | {line["step"]: line["policy_version"] for line in recorded}
    for group in lines(synchronous.run_dir / "rollouts.jsonl"):
        for completion in group["completions"]:
            sampled_by = {completion["first_version"], completion["last_version"]}
            assert sampled_by == {versions[group["step"] - 1]}


def test_an_asynchronous_run_samples_ahead_within_the_bound(finished: CompletedRun) -> None:
    """The first batch is on-policy. Later ones are stale by at most `learner.max_staleness` = 4 versions."""
    stale = [line["staleness/max"] for line in metrics(finished.run_dir)]
    assert stale[0] in (0, None)
    assert 1 <= max(value for value in stale if value is not None) <= 4
