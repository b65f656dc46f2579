"""Make a teacher of the policy of `learn-m3`: `python -m profiles.times_table_maker.teacher --out DIR --seed 0`.

It has 6 million parameters, the tokenizer of the policy, and is trained on all products. It takes about 550 seconds of
a processor core.
"""

from __future__ import annotations

from pathlib import Path

from profiles.maker.command import run_command
from profiles.times_table_maker.__main__ import problems


def make(out: Path, seed: int) -> None:
    """Write the directory `out`: problems, tokenizer, configuration and weights."""
    from profiles.maker.directory import make_directory  # imports MLX, after load_blas
    from profiles.times_table_maker.demonstrations import teach_all
    from profiles.times_table_maker.policy import teacher_recipe

    make_directory(out, teacher_recipe(problems(seed)), teach_all, seed)


if __name__ == "__main__":
    run_command("python -m profiles.times_table_maker.teacher", __doc__, make)
