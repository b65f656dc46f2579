"""The policy and the problems of the profile `calculator`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

from profiles.calculator_maker.__main__ import HELD_OUT, TRAINING, problems, tokenizer_of
from profiles.calculator_maker.problems import HASTY, WORDS, episode
from profiles.environments.calculator import Calculator
from profiles.maker.problem import Problem, write_problems

CALCULATOR = Path(__file__).parents[2] / "profiles" / "calculator"
MAX_BYTES = 2_000_000
TOOL = {word: tool for tool, words in WORDS.items() for word in words}
CALL = re.compile(r"\[(\w+)\(a=(-?\d+), b=(\d+)\)\]")


def operations(problem: Problem) -> list[tuple[str, int]]:
    """Return the tool and the number of each operation, from the prompt."""
    return [(TOOL[word], int(number)) for word, number in re.findall(r"(\w+) (\d+)(?=,|\?)", problem.prompt)]


def test_the_files_have_at_most_two_megabytes() -> None:
    """Weights, tokenizer, problems and model card together."""
    assert sum(path.stat().st_size for path in CALCULATOR.iterdir()) <= MAX_BYTES


def test_problems_and_tokenizer_are_reproducible(tmp_path: Path) -> None:
    """The same seed gives the shipped files; no prompt is in both."""
    made = problems(0)
    for name, own in zip(("train.jsonl", "heldout.jsonl"), made, strict=True):
        write_problems(tmp_path / name, own)
        assert (tmp_path / name).read_bytes() == (CALCULATOR / name).read_bytes()
    assert len({problem.prompt for own in made for problem in own}) == HELD_OUT + TRAINING
    shipped = json.loads((CALCULATOR / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(tokenizer_of(made[0], 0).to_str())["model"] == shipped["model"]


def test_the_tools_that_the_words_mean_lead_to_the_answer() -> None:
    """And the environment rewards it in the last message, and nothing else."""
    for problem in problems(0)[1]:
        calculator, value = Calculator(), int(problem.prompt.split()[2])
        calculator.reset(problem.answer)
        for tool, number in operations(problem):
            value = getattr(calculator, tool)(value, number)
        calculator.step(str(value + 1))
        assert calculator.reward == 0.0
        calculator.step(f"{value}\n")
        assert calculator.reward == 1.0


def test_a_hasty_pupil_mostly_adds() -> None:
    """Otherwise, its tool is the one that the word means. It goes on with the result of its call."""
    rng, added, others = Random(1), 0, 0
    for problem in problems(0)[1]:
        value = problem.prompt.split()[2]
        text = episode(problem, rng)
        for (tool, a, b), (right, number) in zip(CALL.findall(text), operations(problem), strict=True):
            assert (a, int(b)) == (value, number)
            assert tool in ("add", right)
            added, others = added + (tool == "add" != right), others + (right != "add")
            value = str(getattr(Calculator(), tool)(int(a), int(b)))
        assert text.endswith(f"\n{value}")
    assert abs(added / others - HASTY) < 0.1
