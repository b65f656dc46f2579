"""Ctrl-C and SIGTERM: the first signal drains a run, the second stops it, and the run can be resumed."""

from __future__ import annotations

import signal
from pathlib import Path

import openai
import pytest

from bench.soak_clients import BODIES, LONG_PROMPT, MANY_KEYS, post
from tests.e2e.pipeline_process import BATCH, UNEVALUATED, Run, assert_recorded, lines, metrics, run

SETTINGS = ("--checkpoint.interval", "1", "--learner.schedule.warmup-steps", "0")
ENDLESS = (*SETTINGS, "--steps", "5000")
QUESTIONS = 400
"""Upper limit of requests until newer weights respond."""


def checkpointed(run_dir: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def test_the_server_answers_with_the_newest_weights_until_a_drain(tmp_path: Path) -> None:
    """The policy version in the responses increases during training, also after hostile requests, which are refused.

    Ctrl-C drains the run, which has lost no group.
    """
    with Run(tmp_path / "run", *ENDLESS) as running:
        address = running.wait_for("API").split()[1]
        port = int(address.split(":")[2].split("/")[0])
        for name in (MANY_KEYS, LONG_PROMPT):
            assert post(port, *BODIES[name]()) == 400, name
        running.wait_for("tokens/s")
        versions = list(versions_of_responses(address, tmp_path / "run"))
        assert versions == sorted(versions)
        assert versions[-1] >= versions[0] + 2
        running.send(signal.SIGINT)
        result = running.finish()
    assert (result.status, result.err) == (0, ""), result
    accounting = result.accounting
    assert accounting.carried_over == 0
    steps = len(metrics(tmp_path / "run"))
    assert accounting.prompted == steps * BATCH
    assert_recorded(tmp_path / "run", accounting, steps=steps)
    assert (tmp_path / "run" / "adapters" / "adapters.safetensors").exists()
    assert checkpointed(tmp_path / "run") == steps
    assert lines(tmp_path / "run" / "evaluations.jsonl")[-1]["final"]


@pytest.mark.slow
def test_the_second_signal_ends_a_run_whose_computation_hangs(tmp_path: Path) -> None:
    """The process abandons the computation. Nothing is lost: the run can be resumed."""
    run_dir, request = tmp_path / "run", tmp_path / "hang"
    flags = (*SETTINGS, "--learner.objective", "tests.e2e.hanging_code:objective")
    environment = {"CLOTHO_TEST_HANG": str(request)}
    with Run(run_dir, *flags, "--steps", "5000", environment=environment) as running:
        running.wait_for("tokens/s")
        request.touch()
        running.wait_for("hanging")
        running.send(signal.SIGTERM)
        running.wait_for("draining")
        running.send(signal.SIGTERM)
        result = running.finish()
    assert (result.status, result.err) == (128 + signal.SIGTERM, ""), result
    assert lines(run_dir / "log.jsonl")[-1]["event"] == "computation_abandoned"
    assert result.accounting.carried_over > 0
    steps = -(-result.accounting.prompted // BATCH)
    resumed = run(run_dir, *flags, "--steps", str(steps), "--resume")
    assert resumed.status == 0, resumed
    assert_recorded(run_dir, resumed.accounting, steps=steps)


def test_a_crash_of_native_code_prints_the_stacks_of_all_threads(tmp_path: Path) -> None:
    """The fault and the files of all threads are on standard error."""
    run_dir, request = tmp_path / "run", tmp_path / "crash"
    flags = (*SETTINGS, "--learner.objective", "tests.e2e.crashing_code:objective")
    environment = {"CLOTHO_TEST_CRASH": str(request)}
    with Run(run_dir, *flags, "--steps", "5000", environment=environment, small=UNEVALUATED) as running:
        running.wait_for("tokens/s")
        request.touch()
        result = running.finish()
    assert result.status == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in result.err
    files = ("tests/e2e/crashing_code.py", "clotho/lanes/compute_thread.py", "training_run/main.py")
    assert all(name in result.err for name in files)


def versions_of_responses(address: str, run_dir: Path) -> list[int]:
    """Return the distinct versions of consecutive responses, up to the third."""
    versions: list[int] = []
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        while len(set(versions)) < 3 and len(versions) < QUESTIONS:
            known = metrics(run_dir)[-1]["policy_version"]
            raw = client.chat.completions.with_raw_response.create(
                model="policy", messages=[{"role": "user", "content": "What is 2 + 3?"}], max_tokens=8, temperature=0
            )
            assert raw.parse().choices[0].message.content
            versions.append(int(raw.headers["x-clotho-weights-version"]))
            assert versions[-1] >= known - 2, "at most one swap is under way, and one waits for it"
    return versions


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_the_second_signal_stops_at_once_and_the_run_resumes(tmp_path: Path, number: signal.Signals) -> None:
    """Exit status 130 or 143. Groups in flight are carried over and prompted again."""
    with Run(tmp_path / "run", *ENDLESS, small=UNEVALUATED) as running:
        running.wait_for("tokens/s")
        running.send(number)
        running.wait_for("draining")
        running.send(number)
        result = running.finish()
    assert result.status == 128 + number, result
    assert result.err == ""
    assert result.accounting.carried_over > 0
    steps = -(-result.accounting.prompted // BATCH)
    resumed = run(tmp_path / "run", *SETTINGS, "--steps", str(steps), "--resume", small=UNEVALUATED)
    assert resumed.status == 0, resumed
    assert resumed.accounting.prompted == steps * BATCH
    assert_recorded(tmp_path / "run", resumed.accounting, steps=steps)
