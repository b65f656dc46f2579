"""Make the policy of `learn-m3` and its problems again: `python -m profiles.times_table_maker --out DIR --seed 0`.

Writes, in this order, the problems, the tokenizer, the configuration, the trained weights and the model card. Then
trains a second policy by supervised learning on all products, which measures the ceiling; its weights are discarded.
"""

from __future__ import annotations

from pathlib import Path

from profiles.maker.command import run_command
from profiles.maker.problem import Problem, make_problems
from profiles.times_table_maker.problems import GENERATORS

HELD_OUT, TRAINING = 510, 1200
"""Problems in heldout.jsonl and in train.jsonl; no prompt occurs twice in the two together."""


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw the training problems and the held-out problems of a seed."""
    return make_problems(GENERATORS, seed, training=TRAINING, held_out=HELD_OUT)


def make(out: Path, seed: int) -> None:
    """Write the whole directory `out`."""
    from profiles.times_table_maker.policy import make_times_table  # imports MLX, after load_blas

    make_times_table(out, problems(seed), seed)


if __name__ == "__main__":
    run_command("python -m profiles.times_table_maker", __doc__, make)
