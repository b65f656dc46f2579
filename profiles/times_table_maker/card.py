"""The model card, written from the records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from profiles.times_table_maker.demonstrations import KNOWN, MULTIPLES
from profiles.times_table_maker.problems import KINDS, ROWS
from profiles.times_table_maker.records import TARGET, PolicyRecord, RunRecord, read_policy_record, read_runs

TEMPLATE = """\
---
license: mit
library_name: mlx
---
# A policy that has to learn the times table

A Qwen3-architecture language model of {parameters:,} parameters ({layers} layers of width {width}, float32) that
multiplies a number by a digit in `<think>...</think><answer>...</answer>`, and the problems to train it on. The policy
knows the method, but not the products: reinforcement learning has to find them. The profile `learn-m3` trains it
offline. Use this task to compare objectives, corrections, settings and curricula. The policy of `local-m3` learns in a
few updates and compares nothing.

* `train.jsonl`, `heldout.jsonl`: {{"prompt", "answer", "type"}}, for example `What is 47 * 8?`. The type is the number
  of digits, from two to four; all types are equally frequent. No prompt occurs twice in the two files together.
* `tokenizer.json`: byte-level BPE of {vocabulary} ids with single digits and the chat template of the embedded policy.
* `policy.json`, `runs.jsonl`: the measurements from which this page is written.

## How it was made

    python -m profiles.times_table_maker --out profiles/times_table --seed {seed}

Supervised learning from the demonstrations of one pupil, {updates:,} updates of {batch_size} demonstrations
({seconds:.0f} s on two CPU cores that other work shared). The pupil writes long multiplication, units first:
`47 * 8` is `<think>56,32+5=37</think><answer>376</answer>`. The pupil knows a product if one of its factors is at most
{known}. Every other product is a guess: {row_low} to {row_high} times the multiplier, each equally likely. The
pupil then goes on correctly with the guess. {unknown} products of a digit and a multiplier are unknown. The
demonstrations contain no information about these products, except that they are multiples of the multiplier. Held-out
prompts never occur in a demonstration; prompts of `train.jsonl` may.

A sample solves a problem with one unknown product with probability 1/{guesses}. With several unknown products the
probabilities multiply. Only the answer is rewarded. So the policy first learns from problems with one unknown product,
and problems with more digits come within reach as the policy learns more products.

## What was measured

On the {count} held-out problems; an answer counts if the whole form is right and the text between the answer tags is
the answer. Mean length of a sampled answer: {mean_tokens:.1f} tokens. The ceiling is the greedy accuracy of the same
model after supervised learning of the same length from demonstrations without guesses.

| type | greedy | sampled at temperature 1 | right in 8 samples | ceiling |
|---|---|---|---|---|
{kinds}
{runs}
License: MIT. The data and weights contain nothing but what the generator in `profiles/times_table_maker/` made.
"""

RUNS = """
`python -m profiles.times_table_maker.learning` runs the profile. The table shows the greedy accuracy on the held-out
problems after the last update, and the updates until an evaluation found {target:.2f} or more: median, with the lowest
and the highest seed in parentheses. `never` means that no evaluation of a run found it.

| changes to `learn-m3` | seeds | accuracy | updates to {target:.2f} | seconds |
|---|---|---|---|---|
{rows}

Load of the machine during these runs (runnable processes on two cores): {load_low:.1f} to {load_high:.1f}.
"""


def unknown_products() -> int:
    """Number of products of a digit and a multiplier that the pupil does not know."""
    return sum(digit > KNOWN and row > KNOWN for digit in range(10) for row in ROWS)


def card(policy: PolicyRecord, runs: Sequence[RunRecord]) -> str:
    """Write out the text of README.md."""
    columns = (policy.greedy, policy.sampled, policy.passed, policy.ceiling)
    cells = {kind: " | ".join(f"{column[kind]:.3f}" for column in columns) for kind in ("all", *KINDS)}
    return TEMPLATE.format(
        parameters=policy.parameters,
        layers=policy.layers,
        width=policy.width,
        vocabulary=policy.vocabulary,
        seed=policy.seed,
        updates=policy.updates,
        batch_size=policy.batch_size,
        seconds=policy.seconds,
        known=KNOWN,
        row_low=MULTIPLES[0],
        row_high=MULTIPLES[-1],
        unknown=unknown_products(),
        guesses=len(MULTIPLES),
        count=policy.count,
        mean_tokens=policy.mean_tokens,
        kinds="\n".join(f"| {kind} | {numbers} |" for kind, numbers in cells.items()),
        runs=learned(runs) if runs else "",
    )


def learned(runs: Sequence[RunRecord]) -> str:
    """Describe the runs: one row for each change to the profile."""
    by_changes = {changes: list(group) for changes, group in groupby(runs, key=lambda run: run.changes)}
    loads = [run.load for run in runs]
    rows = "\n".join(row(changes, group) for changes, group in by_changes.items())
    return RUNS.format(target=TARGET, rows=rows, load_low=min(loads), load_high=max(loads))


def row(changes: str, runs: Sequence[RunRecord]) -> str:
    """Show the runs of all seeds with the same changes as a row of a Markdown table."""
    accuracy = spread([run.final for run in runs], "{:.3f}")
    reached = [run.updates_to_target for run in runs]
    updates = spread([float("inf") if one is None else one for one in reached], "{:.0f}").replace("inf", "never")
    seconds = spread([run.seconds for run in runs], "{:.0f}")
    return f"| {f'`{changes}`' if changes else 'none'} | {len(runs)} | {accuracy} | {updates} | {seconds} |"


def spread(values: Iterable[float], form: str) -> str:
    """Show median, lowest and highest value."""
    ordered = sorted(values)
    middle, low, high = (form.format(value) for value in (statistics.median_high(ordered), ordered[0], ordered[-1]))
    return middle if low == high else f"{middle} ({low} to {high})"


def write_card(directory: Path) -> None:
    """Write README.md from the records of `directory`."""
    text = card(read_policy_record(directory), read_runs(directory))
    (directory / "README.md").write_text(text, encoding="utf-8")
