"""Runs that learn preferences: the whole program, with pairs of a dataset, with labels, and in stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attachments.preference import attachment
from tests.e2e.pipeline_process import PROBLEMS, adapter, continued, killed_and_continued, lines, metrics, run

STAGES = """
extends = "local-m3"
async = false
server = "off"
eval = "off"

[data]
train = "PAIRS"

[learner]
batch_size = 4

[checkpoint]
interval = 1
keep_last = 9

[[stages]]
kind = "preference"
steps = 4

[[stages]]
kind = "rl"
steps = 1
settings = {learner = {objective = "ipo"}, sampling = {group_size = 4}}
"""


def pairs(directory: Path, **columns: Any) -> str:
    """Write pairs of a right and a wrong answer; return their path."""
    written = []
    for line in (PROBLEMS / "train.jsonl").read_text().splitlines()[:12]:
        one = json.loads(line)
        answers = (f"<think></think><answer>{text}</answer>" for text in (one["answer"], f"{one['answer']}1"))
        written.append(json.dumps({**one, **dict(zip(("chosen", "rejected"), answers, strict=True)), **columns}))
    path = directory / "pairs.jsonl"
    path.write_text("\n".join(written), encoding="utf-8")
    return str(path)


def words(flags: dict[str, str]) -> list[str]:
    """Return the words of a command line on the embedded model."""
    fixed = {"--profile": "local-m3", "--async": "false", "--server": "off", "--learner.batch-size": "6"}
    return [word for item in (fixed | flags).items() for word in item]


def test_a_run_learns_pairs_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The margin rises from 0 at the reference; the held-out loss is that of better completions."""
    train = pairs(tmp_path)
    flags = words(
        {
            "--learner.objective": "dpo", "--data.train": train, "--data.heldout": train, "--eval.problems": "4",
            "--learner.optimizer.learning-rate": "1e-3", "--checkpoint.interval": "1",
        }
    )  # fmt: skip
    whole = run(tmp_path / "whole", *flags, "--steps", "4", small=())
    assert whole.status == 0, whole.err
    found = metrics(tmp_path / "whole")
    assert found[0]["preference_margin"] == pytest.approx(0.0, abs=1e-6)
    assert found[-1]["preference_margin"] > 0
    assert found[-1]["better_log_ratio"] > found[-1]["worse_log_ratio"]
    assert [line["preference/epochs"] for line in found] == [0.5, 1.0, 1.5, 2.0]
    assert {line["preference/cut"] for line in found} == {0.0}
    assert [one for line in found for one in line["findings"]] == []
    assert "pairs in order" in " ".join(attachment.shown(found[-1]))
    assert all(one["loss"] for one in lines(tmp_path / "whole" / "evaluations.jsonl"))
    resumed = continued(tmp_path / "whole", tmp_path / "run", *flags, "--steps", "4", step=2)
    assert resumed == adapter(tmp_path / "whole")


@pytest.mark.parametrize(
    "method",
    [
        {"--learner.objective": "kto", "--policy.method": "full", "--learner.optimizer.learning-rate": "1e-4"},
        {"--learner.objective": "simpo", "--learner.layout": "packed", "--async": "true"},
    ],
    ids=["kto of all weights", "simpo in packed rows"],
)
def test_other_objectives_and_methods_learn_pairs(method: dict[str, str], tmp_path: Path) -> None:
    """As any run."""
    flags = words({"--data.train": pairs(tmp_path), "--eval": "off", "--steps": "2"} | method)
    result = run(tmp_path / "run", *flags, small=())
    assert result.status == 0, result.err
    found = metrics(tmp_path / "run")
    assert [line["groups/trained"] for line in found] == [6, 6]
    assert all(line["preference_accuracy"] is not None for line in found)


@pytest.mark.slow  # two runs in processes of their own
@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_killed_run_resumes_bit_for_bit_in_and_after_a_stage_of_preferences(step: int, tmp_path: Path) -> None:
    """The reference policy is that at the start of the stage, and part of the checkpoints."""
    profile = tmp_path / "stages.toml"
    profile.write_text(STAGES.replace("PAIRS", pairs(tmp_path)), encoding="utf-8")
    flags = ("--profile", str(profile))
    assert run(tmp_path / "whole", *flags, small=()).status == 0
    kinds = [line["preference/epochs"] is None for line in metrics(tmp_path / "whole")]
    assert kinds == [False] * 4 + [True]
    assert killed_and_continued(tmp_path / "run", *flags, step=step) == adapter(tmp_path / "whole")


@pytest.mark.parametrize(
    ("record", "flags", "key"),
    [
        ({"rejected": ""}, {}, "data.train"),
        ({}, {"--sampling.temperature": "0.7"}, "sampling.temperature"),
        ({}, {"--sampling.group-size": "4"}, "sampling.group_size"),
        ({}, {"--learner.objective": "grpo", "--preference.pairs": "rewards"}, "preference.pairs"),
        ({}, {"--preference.pairs": "rewards", "--preference.max-tokens": "9"}, "preference.max_tokens"),
        ({}, {"--learner.objective.mask-truncated": "true"}, "mask_truncated"),
        ({}, {"--learner.kl-penalty": "loss"}, "kl_penalty"),
        ({}, {"--learner.objective": "kto", "--learner.batch-size": "1"}, "batch_size"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    record: dict[str, Any], flags: dict[str, str], key: str, tmp_path: Path
) -> None:
    """With the key, before anything is trained."""
    train = {"--data.train": pairs(tmp_path, **record), "--learner.objective": "dpo"}
    result = run(tmp_path / "run", *words(train | flags), small=())
    assert result.status == 2
    assert key in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_run_of_pairs_needs_no_rewards(objective: str, tmp_path: Path) -> None:
    """Nor answers: its evaluations have the held-out loss alone. Sampled completions have nothing else to compare."""
    train = pairs(tmp_path)
    records = [json.loads(line) for line in Path(train).read_text(encoding="utf-8").splitlines()]
    kept = ("prompt", "chosen", "rejected")
    bare = "\n".join(json.dumps({key: one[key] for key in kept}) for one in records)
    Path(train).write_text(bare, encoding="utf-8")
    flags = {"--learner.objective": objective, "--data.train": train, "--data.heldout": train, "--rewards": "[]"}
    result = run(tmp_path / "run", *words(flags | {"--steps": "1", "--eval.problems": "4"}), small=())
    assert result.status == 0, result.err
    (before, _) = lines(tmp_path / "run" / "evaluations.jsonl")
    assert before["accuracy"] is None
    assert before["loss"]["problems"] == 4
    refused = run(tmp_path / "other", *words(flags | {"--preference.pairs": "rewards"}), small=())
    assert refused.status == 2
    assert "rewards" in refused.err
