"""Runs that learn demonstrations: the whole program with the embedded policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attachments.sft import attachment
from tests.e2e.pipeline_process import PROBLEMS, adapter, continued, lines, metrics, run

SMALL = {
    "--profile": "local-m3", "--learner.objective": "sft", "--learner.batch-size": "4", "--server": "off",
    "--async": "false", "--learner.schedule": "constant", "--eval": "off",
    "--data.heldout": str(PROBLEMS / "heldout.jsonl"),
}  # fmt: skip


def words(flags: dict[str, str]) -> list[str]:
    """Return the command line of a small run with further flags."""
    return [word for pair in (SMALL | flags).items() for word in pair]


def demonstrations(directory: Path, **record: Any) -> str:
    """Write a dataset of 16 right answers without any work, which the policy does not write by itself.

    record: further columns.
    """
    path = directory / "demonstrations.jsonl"
    problems = [json.loads(line) for line in (PROBLEMS / "train.jsonl").read_text().splitlines()[:16]]
    written = [{**one, "completion": f"<think></think><answer>{one['answer']}</answer>", **record} for one in problems]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in written), encoding="utf-8")
    return str(path)


def test_a_run_learns_demonstrations_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The loss of what it learns falls, pass by pass; a run that was interrupted ends with equal weights."""
    flags = words({"--data.train": demonstrations(tmp_path), "--checkpoint.interval": "1"})
    whole = run(tmp_path / "whole", *flags, "--steps", "8", small=())
    assert whole.status == 0, whole.err
    assert whole.accounting.trained == 32
    found = metrics(tmp_path / "whole")
    assert [line["sft/epochs"] for line in found] == [number / 4 for number in range(1, 9)]
    assert found[-1]["loss"] < 0.5 * found[0]["loss"]
    assert {line["ratio_mean"] for line in found} == {line["ess"] for line in found} == {1.0}
    assert {line["sft/cut"] for line in found} == {0.0}
    assert [one for line in found for one in line["findings"]] == []
    text = " ".join(attachment.shown(found[-1]))
    assert "perplexity" in text
    assert "epoch 2.00" in text
    resumed = continued(tmp_path / "whole", tmp_path / "run", *flags, "--steps", "8", step=6)
    assert resumed == adapter(tmp_path / "whole")


@pytest.mark.parametrize(
    "method",
    [
        {"--policy.method": "full", "--learner.layout": "packed", "--learner.optimizer.learning-rate": "1e-4"},
        {"--policy.method": "dora", "--async": "true"},
    ],
    ids=["all weights in packed rows", "asynchronous, with an adapter"],
)
def test_evaluations_sample_from_the_policy_and_measure_the_held_out_loss(
    method: dict[str, str], tmp_path: Path
) -> None:
    """Before and after; the held-out answers are those of the demonstrations, so that their loss falls."""
    train = demonstrations(tmp_path)
    flags = method | {"--data.train": train, "--data.heldout": train, "--eval": "heldout", "--eval.problems": "4"}
    result = run(tmp_path / "run", *words(flags | {"--steps": "2"}), small=())
    assert result.status == 0, result.err
    first, last = lines(tmp_path / "run" / "evaluations.jsonl")
    assert last["loss"]["value"] < first["loss"]["value"]
    assert first["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("record", "flags", "key"),
    [
        ({"completion": ""}, {}, "data.train"),
        ({}, {"--sampling.temperature": "0.7"}, "sampling.temperature"),
        ({}, {"--learner.objective": "grpo", "--sft.train-on": "last"}, "sft.train_on"),
        ({}, {"--sampling.group-size": "4"}, "sampling.group_size"),
        ({}, {"--data.curriculum": "success_rate"}, "curriculum"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    record: dict[str, Any], flags: dict[str, str], key: str, tmp_path: Path
) -> None:
    """With the key, before anything is trained."""
    train = demonstrations(tmp_path, **record)
    result = run(tmp_path / "run", *words(flags | {"--data.train": train}), small=())
    assert result.status == 2
    assert key in result.err
    assert not (tmp_path / "run").exists()
