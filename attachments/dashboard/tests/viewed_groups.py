"""A run with hostile completions for the tests of the rollout viewer, and the values that the viewer must show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from attachments.dashboard.tests.browser import Visit
from attachments.dashboard.tests.synthetic_run import RunShape, write_run, write_tokens

SHAPE = RunShape(groups=64, steps=8, group_size=4, token_steps=2)
TALL = (1280, 3200)
"""A screen on which every row of a run of 80 groups is an element."""

HOSTILE = (
    "<script>document.title = 'executed'</script>",
    "<img src=x onerror=\"document.title='executed'\"><svg onload=alert(1)>",
    "left \u202eright to left\u202c \u2066isolated\u2069 zero\u200bwidth",
    "nul \0 bell \a escape \x1b[31m delete \x7f",
    "&lt;b&gt; &amp; </pre></article> ${1} {{x}} \\u0041 `x`",
    "line one\nline two\r\n\ttab  two spaces \u00a0 \u3000 end ",
    "combining Z\u0351\u036b\u0343 flags 🇩🇪 family 👨\u200d👩\u200d👧 العربية עברית",
)
LONG = "endless" * 150_000
"""1 MB without a place to break the line."""

DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"

Group = dict[str, Any]


def write_viewed_run(directory: Path) -> Path:
    """Write a run of 66 groups. Group 64 contains the hostile texts, with per-token values; group 65 the long text."""
    write_run(directory, SHAPE)
    groups = read_groups(directory)
    completion = groups[-2]["completions"][0]
    hostile = groups[-2] | {"group_id": 64, "completions": [completion | {"text": text} for text in HOSTILE]}
    hostile |= {"prompt": HOSTILE[0], "answer": HOSTILE[1], "type": HOSTILE[0][:20]}
    longest = groups[-2] | {"group_id": 65, "completions": [completion | {"text": LONG + end} for end in "ab"]}
    with (directory / "rollouts.jsonl").open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(one) + "\n" for one in (hostile, longest))
    write_tokens(directory, SHAPE.steps, [*(one for one in groups if one["step"] == SHAPE.steps), hostile])
    return directory


def read_groups(directory: Path) -> list[Group]:
    """Decode the lines of rollouts.jsonl."""
    return [json.loads(line) for line in (directory / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]


def rewards(group: Group) -> list[float]:
    """Rewards of the completions that have one."""
    return [one["reward"] for one in group["completions"] if one["reward"] is not None]


def mean(values: list[float]) -> float | None:
    """Mean of the values; None without values."""
    return sum(values) / len(values) if values else None


COLUMNS: dict[str, Callable[[Group], Any]] = {
    "group_id": lambda group: group["group_id"],
    "step": lambda group: group["step"],
    "outcome": lambda group: group["reason"] or "trained",
    "type": lambda group: group["type"],
    "environment": lambda group: group["environment"],
    "completions": lambda group: len(group["completions"]),
    "reward_mean": lambda group: mean(rewards(group)),
    "reward_spread": lambda group: max(rewards(group)) - min(rewards(group)) if rewards(group) else None,
    "length_mean": lambda group: mean([one["tokens"] for one in group["completions"]]),
    "version_min": lambda group: min((one["first_version"] for one in group["completions"]), default=None),
    "version_max": lambda group: max((one["last_version"] for one in group["completions"]), default=None),
    "truncated": lambda group: sum(one["finish_reason"] == "length" for one in group["completions"]),
    "prompt": lambda group: group["prompt"][:80],
}
"""The values of a group that the list shows, computed from its record."""


def shown_ids(page: Visit) -> list[int]:
    """Group ids of the rows, from top to bottom."""
    return [int(text) for text in page.texts(".rows .group_id")]


def wait_for_list(page: Visit, query: str = "") -> None:
    """Open the list and wait until it is complete."""
    page.open(f"#/groups{'?' if query else ''}{query}")
    page.page.wait_for_selector(".rows .row, .rows .empty")


def open_group(page: Visit, place: str) -> None:
    """Open a group and wait until the values of its tokens have been answered."""
    with page.page.expect_response(re.compile("/tokens$")):
        page.open(f"#/groups/{place}")
    page.page.wait_for_selector("article")
    page.page.wait_for_function("!document.body.textContent.includes('values of the tokens are loading')")


def token_values(run: Path, group: Group, index: int) -> dict[str, list[Any]]:
    """The values of one completion, read from the file."""
    stored = load_file(run / "tokens" / f"step-{group['step']:06d}.safetensors")
    found = (stored["completion_group"] == group["group_id"]) & (stored["completion_index"] == index)
    (which,) = np.flatnonzero(found)
    start, end = stored["completion_start"][which : which + 2]
    names = ("token", "version", "sampled_logprob", "learner_logprob", "ratio", "advantage", "cut", "gradient_share")
    return {name: stored[name][start:end].tolist() for name in names}


def newest(groups: list[Group], *, trained: bool = True) -> Group:
    """The last made-up group with tokens that was trained on, or not trained on, and has completions."""
    return [one for one in groups[:64] if (one["reason"] is None) is trained and one["completions"]][-1]
