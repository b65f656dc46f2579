"""The model card: what the policy is, how it was made, and what was measured."""

from __future__ import annotations

from mlx_lm.models.qwen3 import Model

from profiles.embedded_maker.demonstrations import CAREFUL_SHARE, CARELESS
from profiles.embedded_maker.evaluate import Measurement
from profiles.embedded_maker.pretrain import SHAPE, Schedule, parameter_arrays

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


def table(measurement: Measurement) -> str:
    """Show the measured accuracies as a Markdown table, one row for each kind."""
    lines = ["| kind | greedy | sampled at temperature 1 | right in 8 samples |", "|---|---|---|---|"]
    for kind, greedy in measurement.accuracy.items():
        sampled, passed = measurement.sampled_accuracy[kind], measurement.pass_at_k[kind]
        lines.append(f"| {kind} | {greedy:.3f} | {sampled:.3f} | {passed:.3f} |")
    return "\n".join(lines)


def shares_row(kind: str) -> str:
    """Show one kind's careful shares as a row of a Markdown table."""
    first, second, third = CAREFUL_SHARE[kind]
    return f"| {kind} | {first:.2f} | {second:.2f} | {third:.2f} |"


def card(model: Model, measurement: Measurement, *, seed: int, seconds: float) -> str:
    """Write out the text of README.md; `seconds` is how long the training took."""
    schedule = Schedule()
    return TEMPLATE.format(
        parameters=sum(array.size for array in parameter_arrays(model).values()),
        layers=SHAPE["num_hidden_layers"],
        width=SHAPE["hidden_size"],
        vocabulary=model.args.vocab_size,
        seed=seed,
        steps=schedule.steps,
        batch=schedule.batch_size,
        seconds=seconds,
        tutored=schedule.tutored_steps,
        hasty=CARELESS["hasty"],
        unfinished=CARELESS["unfinished"],
        untagged=CARELESS["untagged"],
        shares="\n".join(map(shares_row, CAREFUL_SHARE)),
        count=measurement.count,
        tokens=measurement.mean_tokens,
        table=table(measurement),
    )
