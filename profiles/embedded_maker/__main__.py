"""Make the embedded policy and its problems again: `python -m profiles.embedded_maker --out DIR --seed 0`.

Writes, in this order, the problems, the tokenizer, the configuration, the trained weights and the model card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random

from clotho.cpu import load_blas
from profiles.embedded_maker.problems import Problem, draw_distinct
from profiles.embedded_maker.tokenizer import save_tokenizer, train_tokenizer

HELD_OUT, TRAINING = 512, 4096
"""Problems in heldout.jsonl and in train.jsonl; no prompt occurs twice in the two together."""


def make_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw the training and the held-out problems that belong to a seed."""
    rng = Random(seed)
    held_out = draw_distinct(rng, HELD_OUT)
    return draw_distinct(rng, TRAINING, exclude=[problem.prompt for problem in held_out]), held_out


def write_problems(path: Path, problems: list[Problem]) -> None:
    """Write JSON lines of `prompt`, `answer` (text) and `type` (the kind)."""
    rows = ({"prompt": problem.prompt, "answer": problem.answer, "type": problem.kind} for problem in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(out: Path, seed: int) -> None:
    """Write the whole directory `out`; the same seed writes the same problems and tokenizer, byte for byte."""
    from profiles.embedded_maker import card, evaluate, pretrain  # MLX is imported here, after load_blas

    out.mkdir(parents=True, exist_ok=True)
    training, held_out = make_problems(seed)
    write_problems(out / "train.jsonl", training)
    write_problems(out / "heldout.jsonl", held_out)
    tokenizer = train_tokenizer(problem.prompt for problem in training)
    save_tokenizer(tokenizer, out, context=pretrain.SHAPE["max_position_embeddings"])
    model = pretrain.make_model(tokenizer.get_vocab_size(), seed)
    began = time.perf_counter()
    exclude = {problem.prompt for problem in held_out}
    pretrain.pretrain(model, tokenizer, pretrain.Schedule(), seed=seed, exclude=exclude)
    seconds = time.perf_counter() - began
    pretrain.save_model(model, tokenizer, out)
    measurement = evaluate.measure(model, tokenizer, held_out)
    table = card.table(measurement)
    (out / "README.md").write_text(card.card(model, measurement, seed=seed, seconds=seconds), encoding="utf-8")
    sys.stdout.write(f"{table}\nwritten to {out} in {seconds:.0f} s of training\n")


def main() -> None:
    """Read the command line and make the directory."""
    parser = argparse.ArgumentParser(prog="python -m profiles.embedded_maker", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="of problems, weights and demonstrations")
    arguments = parser.parse_args()
    sys.stderr.write(f"BLAS: {load_blas()}\n")
    make(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
