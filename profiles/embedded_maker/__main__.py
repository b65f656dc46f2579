"""Make the embedded policy and its problems again: `python -m profiles.embedded_maker --out DIR --seed 0`.

Writes, in this order, the problems, the tokenizer, the configuration, the trained weights and the model card.
"""

from __future__ import annotations

from pathlib import Path

from profiles.embedded_maker.problems import GENERATORS
from profiles.maker.command import run_command
from profiles.maker.problem import Problem, make_problems

HELD_OUT, TRAINING = 512, 4096
"""Problems in heldout.jsonl and in train.jsonl; no prompt occurs twice in the two together."""


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw the training problems and the held-out problems of a seed."""
    return make_problems(GENERATORS, seed, training=TRAINING, held_out=HELD_OUT)


def make(out: Path, seed: int) -> None:
    """Write the whole directory `out`."""
    from profiles.embedded_maker.card import make_embedded  # imports MLX, after load_blas

    make_embedded(out, problems(seed), seed)


if __name__ == "__main__":
    run_command("python -m profiles.embedded_maker", __doc__, make)
