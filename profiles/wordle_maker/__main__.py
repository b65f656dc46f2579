"""Make the policy of `wordle` and its games again: `python -m profiles.wordle_maker --out DIR --seed 0`.

Writes the games, the tokenizer, the configuration and the trained weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from profiles.environments.wordle import WORDS
from profiles.maker.command import run_command
from profiles.maker.problem import Problem
from profiles.maker.tokenizer import save_tokenizer, train_tokenizer
from profiles.wordle_maker.games import HELD_OUT_NAME, NAMES, draw, episode, game


def games() -> tuple[list[Problem], list[Problem]]:
    """Return the games for training, and the held-out ones: every word, with other names."""
    training = [game(name, word) for name in NAMES for word in WORDS]
    return training, [game(HELD_OUT_NAME, word) for word in WORDS]


def write_games(path: Path, problems: Iterable[Problem]) -> None:
    """Write games as JSON Lines, with the secret as a column of the environment."""
    records = ({"prompt": one.prompt, "answer": one.answer, "secret": one.answer} for one in problems)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def tokenizer_of(training: list[Problem], seed: int) -> Tokenizer:
    """Train the tokenizer on one episode of each game."""
    rng = Random(seed)
    held_out = game(HELD_OUT_NAME, WORDS[0]).prompt
    return train_tokenizer([held_out, *(f"{problem.prompt}\n{episode(problem, rng)}" for problem in training)])


def make(out: Path, seed: int) -> None:
    """Write the whole directory `out`."""
    from profiles.maker import pretrain  # imports MLX, after load_blas

    shape = pretrain.SHAPE | {"num_hidden_layers": 2}
    training, held_out = games()
    out.mkdir(parents=True, exist_ok=True)
    write_games(out / "train.jsonl", training)
    write_games(out / "heldout.jsonl", held_out)
    tokenizer = tokenizer_of(training, seed)
    save_tokenizer(tokenizer, out, context=shape["max_position_embeddings"])
    model = pretrain.make_model(shape, tokenizer.get_vocab_size(), seed)
    lesson = pretrain.Lesson(
        draw=draw,
        demonstrate=lambda problem, rng, step: episode(problem, rng),
        exclude={problem.prompt for problem in held_out},
    )
    pretrain.pretrain(model, tokenizer, lesson, pretrain.Schedule(steps=700, batch_size=32), seed=seed)
    pretrain.save_model(model, tokenizer, shape, out)


if __name__ == "__main__":
    run_command("python -m profiles.wordle_maker", __doc__, make)
