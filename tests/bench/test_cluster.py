"""`python -m bench cluster`: costs from the directories of runs, the command line, and the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench import cluster
from bench.cluster import MeasuredRun, Simulated, best_ahead, efficiency, main, quantity, read, table
from bench.cluster_costs import Costs, Plan, Workload
from bench.cluster_runs import RunFilesError, costs_of, fit, read_run, workload_of
from bench.cluster_simulation import simulate
from bench.fingerprint import fingerprint

STEP, ROW, GROUP, UPDATE, TOKEN = 1e-3, 2e-5, 4e-3, 0.1, 1e-4
PUSH, LATENCY, ANSWER = 0.03, 0.002, 0.001
HERE = fingerprint()


def write_run(
    directory: Path, *, batch: int = 4, steps: int = 9, workers: int = 0, asynchronous: bool = False, slow: float = 1.0
) -> Path:
    """Write the files of a run whose times follow from the costs above. slow: factor of the times."""
    directory.mkdir()
    cluster_section = f'[cluster]\ntype = "ray"\nworkers = {workers}\nsync_interval = 1\n' if workers else ""
    (directory / "profile.toml").write_text(
        f"async = {str(asynchronous).lower()}\n[policy.method]\ntype = 'lora'\n[learner]\nbatch_size = {batch}\n"
        "[learner.objective]\ntype = 'grpo'\n[rollouts]\nmax_batches_ahead = 2\n"
        f"[engine]\ndecode_share = 0.7\nmax_num_seqs = 64\n{cluster_section}"
    )
    (directory / "facts.json").write_text('{"dtype": "float32", "trainable_parameters": 1000}')
    metrics, rollouts, moment = list[dict[str, Any]](), list[dict[str, Any]](), 0.0
    servers = {f"worker-{number}": {"push_seconds": PUSH} for number in range(workers)}
    for step in range(1, steps + 1):
        lengths = [[5 + (7 * step + 3 * group * row) % 40 for row in range(4)] for group in range(batch)]
        longest, tokens = max(map(max, lengths)), sum(map(sum, lengths))
        decode = slow * (STEP * longest + ROW * tokens + GROUP * batch)
        update = slow * (UPDATE + TOKEN * tokens)
        wait = decode + PUSH + 2 * LATENCY + ANSWER * batch if workers else decode
        moment += wait + update
        metrics.append(
            {
                "step": step,
                "time/run": moment,
                "time/wait_for_rollouts": wait,
                "time/decode": 0.0 if workers else decode,
                "time/update": update,
                "trained_tokens": tokens,
                "remote_servers": servers,
            }
        )
        for group in lengths:
            completions = [{"tokens": length} for length in group]
            rollouts.append({"step": step, "reason": None, "completions": completions})
    turns = {"swap": {"counts": [steps], "total": 0.01 * steps}, "parity": {"counts": [0], "total": 0.01 * steps}}
    files = {"metrics": metrics, "rollouts": rollouts, "log": [{"event": "run_statistics", "engine": {"turns": turns}}]}
    for name, lines in files.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_costs_follow_from_synchronous_runs(tmp_path: Path) -> None:
    """With two batch sizes, the costs of step, row and group are separated; a worker adds weights and messages."""
    runs = [
        read_run(write_run(tmp_path / f"{workers}-{batch}", batch=batch, workers=workers))
        for workers in (0, 1)
        for batch in (4, 1)
    ]
    costs = costs_of(runs)
    assert costs.step_seconds == pytest.approx(STEP)
    assert costs.row_seconds == pytest.approx(ROW)
    assert costs.group_seconds == pytest.approx(GROUP)
    assert costs.update_seconds == pytest.approx(UPDATE)
    assert costs.update_token_seconds == pytest.approx(TOKEN)
    assert costs.load_seconds == pytest.approx(PUSH)
    assert costs.latency_seconds == pytest.approx(LATENCY)
    assert costs.head_group_seconds == pytest.approx(ANSWER)
    assert costs.version_seconds == pytest.approx(0.02)
    assert costs.weight_bytes == 4000
    assert runs[0].plan == Plan(batch_size=4, max_batches_ahead=0, synchronous=True, decode_share=0.7, max_num_seqs=64)
    assert len(workload_of(runs[0]).lengths) == 36
    assert runs[0].groups_per_second(4) > 0.0
    assert simulate(costs, workload_of(runs[0]), Plan(batch_size=4)).trained > 0


def test_side_by_side_runs_give_the_efficiency_of_the_cores(tmp_path: Path) -> None:
    """Both runs take 1.25 times as long as one alone."""
    alone, *together = (
        read_run(write_run(tmp_path / name, slow=slow)) for name, slow in (("1", 1.0), ("2", 1.25), ("3", 1.25))
    )
    assert efficiency(alone, together) == pytest.approx(0.8)


def test_costs_that_an_asynchronous_run_does_not_determine_are_asked_for(tmp_path: Path) -> None:
    """Its batches are decoded beside each other. With the decode costs given, the others come from the run."""
    run = read_run(write_run(tmp_path / "run", asynchronous=True))
    with pytest.raises(RunFilesError, match="--step-seconds"):
        costs_of([run])
    assert costs_of([run], {"step_seconds": 1.0, "row_seconds": 2.0}).update_seconds == pytest.approx(UPDATE)


def test_a_fit_has_no_negative_costs_and_ignores_a_pause() -> None:
    """A negative coefficient becomes 0."""
    assert fit([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])[1] == 0.0
    values = [2.0 * number for number in range(1, 20)]
    assert fit([[float(number)] for number in range(1, 20)], [*values[:-1], 500.0]) == pytest.approx([2.0])


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", "0"],
        ["--bandwidth", "0"],
        ["--efficiency", "2"],
        ["--steps", "1"],
        ["--from", "missing"],
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    """The exit status is 2, and nothing is written."""
    source, out = write_run(tmp_path / "run"), tmp_path / "out.jsonl"
    assert main(["--simulate", "--from", str(source), "--out", str(out), *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize("damaged", ["metrics.jsonl", "facts.json", "profile.toml", "log.jsonl"])
def test_files_of_another_format_are_reported(tmp_path: Path, damaged: str) -> None:
    """The directory is named."""
    source = write_run(tmp_path / "run")
    (source / damaged).write_text('{"other": 1}\n')
    with pytest.raises(RunFilesError, match="run"):
        costs_of([read_run(source)])


@pytest.mark.parametrize(
    ("text", "value"), [("1Gbit/s", 1.25e8), ("4GB", 4e9), ("20ms", 0.02), ("10%", 0.1), ("2e-3", 2e-3), ("0", 0.0)]
)
def test_quantities_have_units(text: str, value: float) -> None:
    """A unit is optional."""
    assert quantity(text) == pytest.approx(value)


def test_a_flag_replaces_a_cost_or_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a row per number of workers; the results can be read again."""
    source, out = write_run(tmp_path / "run"), tmp_path / "out.jsonl"
    flags = ["--workers", "1", "3", "--weight-bytes", "5MB", "--bandwidth", "1Gbit/s", "--version-seconds", "0"]
    assert main(["--simulate", "--from", str(source), "--out", str(out), "--steps", "6", *flags]) == 0
    found = read(out)
    assert [one.forecast.workers for one in found if isinstance(one, Simulated)] == [1, 3]
    assert isinstance(found[0], Simulated)
    assert (found[0].costs.weight_bytes, found[0].costs.bandwidth, found[0].costs.version_seconds) == (5e6, 1.25e8, 0.0)
    assert found[0].plan.batch_size == 4
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]) == 3


COSTS = Costs(step_seconds=1e-3, row_seconds=1e-4, update_seconds=0.05, update_token_seconds=0.0, latency_seconds=0.1)
WORK = Workload(lengths=((20,) * 4,), zero_variance=(False,))


def test_the_fewest_batches_that_do_not_limit_are_chosen() -> None:
    """More batches would not be faster; fewer would be slower."""
    plan = Plan(workers=2, batch_size=2, steps=12, warm_up=4)
    found, best = best_ahead(COSTS, WORK, plan)
    slower = simulate(COSTS, WORK, Plan(workers=2, batch_size=2, steps=12, warm_up=4, max_batches_ahead=1))
    assert best.max_batches_ahead == found.max_batches_ahead > 1
    assert slower.groups_per_second < found.groups_per_second


def test_the_table_compares_measured_and_predicted_runs() -> None:
    """A prediction belongs to the run with the same engine and number of workers."""
    plan = Plan(workers=2, steps=3, warm_up=1)
    forecast = simulate(COSTS, WORK, plan)
    measured = MeasuredRun(
        name="two", flags=(), sources="", command="", fingerprint=HERE, workers=2, load="few",
        groups_per_second=forecast.groups_per_second / 1.1,
    )  # fmt: skip
    simulated = [
        Simulated(scenario=title, costs=COSTS, plan=plan, forecast=forecast, command="", fingerprint=HERE)
        for title in (f"{cluster.VALIDATION}few", "what if")
    ]
    assert [msgspec.json.decode(msgspec.json.encode(one), type=Simulated) for one in simulated] == simulated
    text = table([measured, *simulated])
    assert "| +10% |" in text
    assert text.count("**what if**") == 1
    assert cluster.VALIDATION not in text
