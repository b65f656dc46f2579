"""Make a teacher of the embedded policy: `python -m profiles.embedded_maker.teacher --out DIR --seed 0`.

It has 6 million parameters, the tokenizer of the policy, and is trained on careful demonstrations alone.
"""

from __future__ import annotations

from pathlib import Path

from profiles.embedded_maker.__main__ import problems
from profiles.embedded_maker.demonstrations import careful
from profiles.embedded_maker.problems import draw
from profiles.maker.command import run_command


def make(out: Path, seed: int) -> None:
    """Write the directory `out`: problems, tokenizer, configuration and weights."""
    from profiles.maker.directory import Recipe, make_directory  # imports MLX, after load_blas
    from profiles.maker.pretrain import TEACHER_SHAPE, Schedule

    schedule = Schedule(steps=2400, batch_size=16, learning_rate=2e-3)
    recipe = Recipe(problems=problems(seed), draw=draw, shape=TEACHER_SHAPE, schedule=schedule)
    make_directory(out, recipe, lambda problem, *_: careful(problem), seed)


if __name__ == "__main__":
    run_command("python -m profiles.embedded_maker.teacher", __doc__, make)
