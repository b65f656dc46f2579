"""The policy: its training, and the measurement of its base accuracy and of the ceiling."""

from __future__ import annotations

from pathlib import Path

from profiles.maker.directory import Recipe, make_directory, make_model, teach
from profiles.maker.evaluate import measure
from profiles.maker.pretrain import SHAPE, TEACHER_SHAPE, Schedule, parameter_arrays
from profiles.maker.problem import Problem
from profiles.times_table_maker.card import write_card
from profiles.times_table_maker.demonstrations import demonstrate, teach_all
from profiles.times_table_maker.problems import draw
from profiles.times_table_maker.records import PolicyRecord, write_policy_record

TIMES_TABLE_SHAPE = SHAPE | {"num_hidden_layers": 2}
SCHEDULE = Schedule(steps=1000)
TEACHER_SCHEDULE = Schedule(steps=260, batch_size=48, learning_rate=2e-3, warmup_steps=30)


def make_times_table(out: Path, problems: tuple[list[Problem], list[Problem]], seed: int) -> None:
    """Make the problems, the policy, its record and the card."""
    recipe = Recipe(problems=problems, draw=draw, shape=TIMES_TABLE_SHAPE, schedule=SCHEDULE)
    made = make_directory(out, recipe, demonstrate, seed)
    taught = make_model(recipe, made.tokenizer, seed)
    teach(taught, made.tokenizer, recipe, teach_all, seed)
    base, ceiling = made.measurement, measure(taught, made.tokenizer, problems[1])
    record = PolicyRecord(
        parameters=sum(array.size for array in parameter_arrays(made.model).values()),
        layers=recipe.shape["num_hidden_layers"],
        width=recipe.shape["hidden_size"],
        vocabulary=made.tokenizer.get_vocab_size(),
        seed=seed,
        updates=SCHEDULE.steps,
        batch_size=SCHEDULE.batch_size,
        seconds=made.seconds,
        count=base.count,
        mean_tokens=base.mean_tokens,
        greedy=base.accuracy,
        sampled=base.sampled_accuracy,
        passed=base.pass_at_k,
        ceiling=ceiling.accuracy,
    )
    write_policy_record(out, record)
    write_card(out)


def teacher_recipe(problems: tuple[list[Problem], list[Problem]]) -> Recipe:
    """Return how a teacher of the policy is made, which is larger."""
    return Recipe(problems=problems, draw=draw, shape=TEACHER_SHAPE, schedule=TEACHER_SCHEDULE)
