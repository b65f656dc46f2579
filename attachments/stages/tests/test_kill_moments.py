"""Runs of one kind of stage that are killed at twenty moments, one after another."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from attachments.distillation.tests.teachers import other_model
from tests.e2e.pipeline_process import PROBLEMS, adapter, killed_at_moments, lines, run

MOMENTS = 20

STEPS = 100

TEXT = """
extends = "local-m3"
async = false
server = "off"
eval = "off"

[data]
train = "PROBLEMS/train.jsonl"
heldout = "PROBLEMS/heldout.jsonl"

[learner]
batch_size = 2
schedule = "linear"

[checkpoint]
interval = 1

[[stages]]
steps = STEPS
"""

SAMPLED = "[stages.settings.sampling]\ngroup_size = 2\nmax_tokens = 16\n"

KINDS = {
    "sft": 'kind = "sft"\ndata = "DATA"\n',
    "rl": f'kind = "rl"\n{SAMPLED}',
    "distill": f'kind = "distill"\n{SAMPLED}[stages.settings.distillation]\nteacher = "TEACHER"\n',
    "preference": 'kind = "preference"\ndata = "DATA"\n',
}


def write_profile(directory: Path, kind: str) -> str:
    """Write the profile of a run with one stage of a kind, and what it reads; return its path."""
    written = []
    for line in (PROBLEMS / "train.jsonl").read_text().splitlines()[:20]:
        one = json.loads(line)
        right, wrong = (f"<think></think><answer>{text}</answer>" for text in (one["answer"], f"{one['answer']}1"))
        columns = {"completion": right} if kind == "sft" else {"chosen": right, "rejected": wrong}
        written.append(json.dumps({**one, **columns}))
    (directory / "data.jsonl").write_text("\n".join(written), encoding="utf-8")
    if kind == "distill":
        other_model(directory / "teacher", scale=0.3)
    text = TEXT.replace("STEPS", str(STEPS)) + KINDS[kind]
    names = {"PROBLEMS": PROBLEMS, "DATA": directory / "data.jsonl", "TEACHER": directory / "teacher"}
    for name, path in names.items():
        text = text.replace(name, str(path))
    (directory / "stages.toml").write_text(text, encoding="utf-8")
    return str(directory / "stages.toml")


@pytest.mark.slow  # twenty runs in processes of their own
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_at_twenty_moments_ends_with_equal_weights(kind: str, tmp_path: Path) -> None:
    """While it starts, between steps and in them: each time it is resumed from what the kill has left.

    The histories have every step once, and every group of the uninterrupted run.
    """
    flags = ("--profile", write_profile(tmp_path, kind))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = run(whole, *flags, small=())
    assert result.status == 0, result.err
    assert killed_at_moments(killed, *flags, moments=MOMENTS, choose=random.Random(kind)) == adapter(whole)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        found, expected = ([one["step"] for one in lines(place / name)] for place in (killed, whole))
        assert found == expected
    shutil.rmtree(killed)
