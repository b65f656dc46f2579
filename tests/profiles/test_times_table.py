"""The policy of `learn-m3`, its problems, and the card with its measurements."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from random import Random
from typing import cast

import mlx_lm
import pytest
from mlx_lm.models.qwen3 import Model
from tokenizers import Tokenizer

from profiles.maker.evaluate import complete, is_right
from profiles.maker.problem import write_problems
from profiles.maker.tokenizer import train_tokenizer
from profiles.times_table_maker.__main__ import HELD_OUT, TRAINING, problems
from profiles.times_table_maker.card import card, row
from profiles.times_table_maker.demonstrations import demonstrate, is_known, teach_all
from profiles.times_table_maker.learning import measure
from profiles.times_table_maker.problems import KINDS, draw, factors, long_multiplication
from profiles.times_table_maker.records import RunRecord, add_run, read_policy_record, read_runs
from training_run.profile.load import load_profile

TIMES_TABLE = Path(__file__).parents[2] / "profiles" / "times_table"
MAX_BYTES = 3_000_000
FILES = {"train.jsonl": TRAINING, "heldout.jsonl": HELD_OUT}


def lines(name: str) -> list[dict[str, str]]:
    """Read the rows of a shipped JSONL file."""
    return [json.loads(line) for line in (TIMES_TABLE / name).read_text(encoding="utf-8").splitlines()]


def test_the_files_have_at_most_three_megabytes() -> None:
    """Weights, tokenizer, problems, records and model card together."""
    assert sum(path.stat().st_size for path in TIMES_TABLE.iterdir()) <= MAX_BYTES


def test_the_problems_are_reproducible(tmp_path: Path) -> None:
    """The same seed gives the shipped files, byte for byte; another seed gives other problems."""
    for name, made in zip(FILES, problems(0), strict=True):
        write_problems(tmp_path / name, made)
        assert (tmp_path / name).read_bytes() == (TIMES_TABLE / name).read_bytes()
    assert problems(1)[1] != problems(0)[1]


def test_the_tokenizer_is_reproducible() -> None:
    """The merges are a function of the training problems."""
    made = train_tokenizer(problem.prompt for problem in problems(0)[0])
    shipped = json.loads((TIMES_TABLE / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(made.to_str())["model"] == shipped["model"]


def test_no_prompt_occurs_twice() -> None:
    """Training problems and held-out problems are disjoint, and every type is equally frequent."""
    assert len({row["prompt"] for name in FILES for row in lines(name)}) == TRAINING + HELD_OUT
    for name, count in FILES.items():
        assert Counter(row["type"] for row in lines(name)) == dict.fromkeys(KINDS, count // len(KINDS))


def test_every_answer_is_the_product_of_the_two_numbers() -> None:
    """Computed from the prompt; the type is the number of digits."""
    for problem in (*problems(0)[0], *problems(0)[1]):
        number, row = factors(problem)
        assert problem.answer == str(number * row)
        assert len(str(number)) == KINDS[problem.kind]


def test_long_multiplication_carries() -> None:
    """The example of the docstring; a wrong product leads to a wrong answer, but the work goes on correctly."""
    assert long_multiplication(47, 8) == (("56", "32+5=37"), "376")
    wrong = long_multiplication(47, 8, lambda digit, row: 64 if digit == 7 else digit * row)
    assert wrong == (("64", "32+6=38"), "384")


def test_the_pupil_is_right_exactly_where_all_products_are_known_or_guessed_right() -> None:
    """Over many demonstrations: always right with known products, and sometimes right by chance otherwise."""
    rng = Random(3)
    unknown: list[bool] = []
    for step in range(2000):
        problem = draw(rng)
        number, row = factors(problem)
        right = is_right(demonstrate(problem, rng, step), problem.answer)
        if all(is_known(int(digit), row) for digit in str(number)):
            assert right
        else:
            unknown.append(right)
        assert is_right(teach_all(problem, rng, step), problem.answer)
    assert 0 < statistics.mean(unknown) < 0.2


def test_the_card_is_written_from_the_records() -> None:
    """No number of the card was entered by hand."""
    assert card(read_policy_record(TIMES_TABLE), read_runs(TIMES_TABLE)) == (TIMES_TABLE / "README.md").read_text()


def test_the_shipped_weights_have_about_the_recorded_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers to a third of the held-out problems, from the files alone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = cast(Model, mlx_lm.load(str(TIMES_TABLE))[0])
    tokenizer = Tokenizer.from_file(str(TIMES_TABLE / "tokenizer.json"))
    rows = lines("heldout.jsonl")[: HELD_OUT // 3]
    answers = complete(model, tokenizer, [row["prompt"] for row in rows], temperature=0.0)
    right = [is_right(tokenizer.decode(ids), row["answer"]) for ids, row in zip(answers, rows, strict=True)]
    assert abs(statistics.mean(right) - read_policy_record(TIMES_TABLE).greedy["all"]) < 0.1


def test_a_run_replaces_an_earlier_run_with_the_same_changes_and_seed(tmp_path: Path) -> None:
    """Runs are ordered by changes and seed; the accuracy that reaches the target first counts."""
    for seed, final in ((1, 0.5), (0, 0.85), (1, 0.9)):
        curve = [(0, 0.2), (10, final), (20, 0.7)]
        add_run(tmp_path, RunRecord(changes="", seed=seed, accuracy=curve, seconds=1.0, load=1.0))
    found = read_runs(tmp_path)
    assert [(run.seed, run.updates_to_target, run.final) for run in found] == [(0, 10, 0.7), (1, 10, 0.7)]


def test_the_card_says_if_a_seed_never_reached_the_target() -> None:
    """Of an even number of seeds, the upper of the two in the middle counts as the median."""
    curves = ([(0, 0.2), (10, 0.9)], [(0, 0.2), (10, 0.3)])
    found = [RunRecord(changes="--x 1", seed=i, accuracy=a, seconds=1.0, load=1.0) for i, a in enumerate(curves)]
    cells = [cell.strip() for cell in row("--x 1", found).strip("|").split("|")]
    assert cells == ["`--x 1`", "2", "0.900 (0.300 to 0.900)", "never (10 to never)", "1"]


@pytest.mark.slow
def test_a_run_of_the_profile_is_measured() -> None:
    """The record has the accuracy before the first update, every ten updates, and after the last one."""
    run = measure(0, ["--steps", "20", "--learner.batch-size", "4", "--sampling.group-size", "4"])
    assert [update for update, _ in run.accuracy] == [0, 10, 20]
    assert run.accuracy[0][1] == read_policy_record(TIMES_TABLE).greedy["all"]


def test_the_profile_uses_these_files() -> None:
    """It needs no network."""
    profile = load_profile("learn-m3")
    assert [Path(profile.data.train), Path(profile.data.heldout)] == [TIMES_TABLE / name for name in FILES]
    assert Path(profile.model.path) == TIMES_TABLE


def test_the_teacher_has_the_tokenizer_of_the_policy_and_6_million_parameters() -> None:
    """A policy learns from tokens that are its own."""
    from profiles.maker.directory import make_model
    from profiles.maker.pretrain import parameter_arrays
    from profiles.times_table_maker.policy import teacher_recipe

    recipe = teacher_recipe(problems(0))
    tokenizer = train_tokenizer(problem.prompt for problem in recipe.problems[0])
    assert tokenizer.get_vocab() == Tokenizer.from_file(str(TIMES_TABLE / "tokenizer.json")).get_vocab()
    model = make_model(recipe, tokenizer, 0)
    assert sum(array.size for array in parameter_arrays(model).values()) == 5_976_576
