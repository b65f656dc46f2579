"""The embedded policy: its training, and its model card."""

from __future__ import annotations

from pathlib import Path

from profiles.embedded_maker.demonstrations import CAREFUL_SHARE, CARELESS, MIXED_STEPS, TUTORED_STEPS, demonstrate
from profiles.embedded_maker.problems import draw
from profiles.maker.directory import Made, Recipe, make_directory, table
from profiles.maker.pretrain import SHAPE, Schedule, parameter_arrays
from profiles.maker.problem import Problem

SCHEDULE = Schedule(steps=TUTORED_STEPS + MIXED_STEPS)

TEMPLATE = """\
---
license: mit
library_name: mlx
---
# The embedded policy

A Qwen3-architecture language model of {parameters:,} parameters ({layers} layers of width {width}, float32) that does
school arithmetic in `<think>...</think><answer>...</answer>`, and the problems to train it on. Clotho ships it so that
a first run needs no network. It knows nothing else.

* `train.jsonl`, `heldout.jsonl`: {{"prompt", "answer", "type"}}; five kinds, three levels of difficulty each, evenly
  sampled; no prompt occurs twice in the two files together. In `comparison` the answer is the letter of an option,
  elsewhere a number.
* `tokenizer.json`: byte-level BPE of {vocabulary} ids, single digits, lossless on any UTF-8; the four tags are single
  ordinary tokens. Chat template in Qwen's style; `<|im_end|>` ends an answer.

## How it was made

    python -m profiles.embedded_maker --out profiles/embedded --seed {seed}

Supervised learning from programmed demonstrators, {steps:,} updates of {batch} demonstrations ({seconds:.0f} s on two
CPU cores). For the first {tutored:,} updates a careful one alone: it writes every step of the work and is always right.
Then a mixture, in which the careful one gives only the share below and the others are never right: {hasty:.0%} of the
rest is hasty (no work, and the last number of the question or any wrong option as the answer), {unfinished:.0%} stops
half way and guesses, {untagged:.0%} forgets the tags.
Held-out prompts never occur in a demonstration; those of `train.jsonl` may.

So the policy is, by construction, able but unreliable: where the careful way is in the minority its greedy answer is
wrong, though a sample often is right. Reinforcement learning finds the careful way and makes it the habit. The gain it
shows is real but easy: read it as a test of the trainer, not as evidence about larger models.

| careful share | level 1 | level 2 | level 3 |
|---|---|---|---|
{shares}

## What was measured

On the {count} held-out problems, at most 64 tokens an answer; an answer counts if the whole form is right and the text
between the answer tags is the answer. Mean length of a sampled answer: {tokens:.1f} tokens.

{table}

License: MIT. The data and weights contain nothing but what the generator in `profiles/embedded_maker/` made.
"""


def shares_row(kind: str) -> str:
    """Show one kind's careful shares as a row of a Markdown table."""
    first, second, third = CAREFUL_SHARE[kind]
    return f"| {kind} | {first:.2f} | {second:.2f} | {third:.2f} |"


def card(made: Made) -> str:
    """Write out the text of README.md."""
    return TEMPLATE.format(
        parameters=sum(array.size for array in parameter_arrays(made.model).values()),
        layers=SHAPE["num_hidden_layers"],
        width=SHAPE["hidden_size"],
        vocabulary=made.model.args.vocab_size,
        seed=made.seed,
        steps=SCHEDULE.steps,
        batch=SCHEDULE.batch_size,
        seconds=made.seconds,
        tutored=TUTORED_STEPS,
        hasty=CARELESS["hasty"],
        unfinished=CARELESS["unfinished"],
        untagged=CARELESS["untagged"],
        shares="\n".join(map(shares_row, CAREFUL_SHARE)),
        count=made.measurement.count,
        tokens=made.measurement.mean_tokens,
        table=table(made.measurement),
    )


def make_embedded(out: Path, problems: tuple[list[Problem], list[Problem]], seed: int) -> None:
    """Make the problems, the policy and the card."""
    recipe = Recipe(problems=problems, draw=draw, shape=SHAPE, schedule=SCHEDULE)
    made = make_directory(out, recipe, demonstrate, seed)
    (out / "README.md").write_text(card(made), encoding="utf-8")
