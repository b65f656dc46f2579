"""New runs that start from other runs: a fork continues with the whole state, another run with the adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from attachments.files.convert import convert
from tests.e2e.conftest import EVALUATED, HELD_OUT, CompletedRun
from tests.e2e.pipeline_process import REPOSITORY, SMALL, lines, run


@pytest.mark.slow
def test_a_synchronous_fork_repeats_the_updates_of_the_other_run(tmp_path: Path) -> None:
    """Bit for bit, and `--resume-step` too. With another learning rate the fork has other weights."""
    flags = ("--steps", "4", "--async", "false", "--checkpoint.interval", "2")
    assert run(tmp_path / "whole", *flags).status == 0
    hashes = [line["weights_hash"] for line in lines(tmp_path / "whole" / "metrics.jsonl")]
    fork = run(tmp_path / "fork", "--fork", f"{tmp_path / 'whole'}@2")
    assert fork.status == 0, fork
    assert [line["weights_hash"] for line in lines(tmp_path / "fork" / "metrics.jsonl")] == hashes
    adapters = [(tmp_path / name / "adapters/adapters.safetensors").read_bytes() for name in ("whole", "fork")]
    assert adapters[0] == adapters[1]
    assert fork.accounting.prompted == 4 * 4
    other = run(tmp_path / "other", "--fork", f"{tmp_path / 'whole'}@2", "--learner.optimizer.learning-rate", "1e-4")
    assert other.status == 0, other
    found = [line["weights_hash"] for line in lines(tmp_path / "other" / "metrics.jsonl")]
    assert (found[:2], found[2] == hashes[2]) == (hashes[:2], False)
    resumed = run(tmp_path / "whole", "--resume-step", "2", *flags)
    assert resumed.status == 0, resumed
    assert [line["weights_hash"] for line in lines(tmp_path / "whole" / "metrics.jsonl")] == hashes
    kept = tmp_path / "whole" / "superseded" / "001-after-step-000002"
    assert [line["step"] for line in lines(kept / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (kept / "checkpoints" / "step-000004").is_dir()


@pytest.mark.slow
def test_the_accuracy_at_step_0_is_that_of_the_adapter(tmp_path: Path, finished: CompletedRun) -> None:
    """From the final adapter of a run, and from the same adapter in the format of PEFT, on the same problems."""
    peft = tmp_path / "peft"
    convert(finished.run_dir / "adapters", peft, "peft", model=str(REPOSITORY / "profiles" / "embedded"))
    final = lines(finished.run_dir / "evaluations.jsonl")[-1]
    for name, adapter in (("mlx", finished.run_dir), ("peft", peft)):
        flags = ("--steps", "1", "--policy.adapter", str(adapter), *EVALUATED)
        result = run(tmp_path / f"from-{name}", *flags, small=(*SMALL[:-1], str(HELD_OUT)))
        assert result.status == 0, result
        first = lines(tmp_path / f"from-{name}" / "evaluations.jsonl")[0]
        assert (first["step"], first["accuracy"], first["accuracy_by_type"]) == (
            0, final["accuracy"], final["accuracy_by_type"],
        )  # fmt: skip
