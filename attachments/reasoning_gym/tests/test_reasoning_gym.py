"""Problems of Reasoning Gym: names and tables, generation in processes, repeatability, and errors that name the key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from attachments.reasoning_gym import reasoning_gym
from attachments.reasoning_gym.gym_library import Generated, Job, JobRefused, as_json
from attachments.reasoning_gym.reasoning_gym import (
    BLOCK,
    ORIGIN,
    GymProcesses,
    epoch_weights,
    gym_problems,
    sections_of,
)
from attachments.reasoning_gym.sections import TABLES, GymSection
from protocols.errors import DatasetError
from protocols.prompt import Problem
from training_run.groups.order import ProblemOrder
from training_run.profile.data import DataSection

needs_library = pytest.mark.needs_extra("reasoning-gym")

EASY = GymSection(name="easy", dataset="chain_sum", size=150, settings={"max_terms": 2, "max_digits": 2})
FEW = GymSection(name="few", dataset="products", size=400, settings={"max_digits": 1})
"""One digit times one digit has 100 different prompts."""


def data(train: str, *tables: GymSection, **values: Any) -> DataSection:
    """The settings with these tables."""
    return TABLES.put(DataSection(train=train, **values), tables)


def job(dataset: str, *, level: int | None = None, count: int = 2, **settings: Any) -> Job:
    """A job of a few problems."""
    return Job(dataset=dataset, settings=settings, level=level, seed=7, size=BLOCK, count=count)


def test_names_without_a_table_have_the_defaults_of_the_library() -> None:
    """A table is found by its name, which by default is that of the dataset."""
    assert sections_of(data("reasoning_gym:easy, gcd", EASY), "reasoning_gym:easy, gcd") == [
        EASY,
        GymSection(dataset="gcd"),
    ]


@pytest.mark.parametrize("path", ["reasoning_gym:", "reasoning_gym:gcd,", "reasoning_gym:gcd,gcd"])
def test_empty_and_repeated_names_are_refused(path: str) -> None:
    """Exit status 2."""
    with pytest.raises(DatasetError) as caught:
        sections_of(data(path), path)
    assert caught.value.exit_status == 2


def test_shares_of_an_epoch_follow_the_weights_without_repetition() -> None:
    """The dataset with the fewest problems for its weight is used up; type weights multiply."""
    tables = (GymSection(dataset="a", weight=3.0), GymSection(dataset="b"))
    problems = [Problem(prompt=str(i), answer="", type="a" if i < 90 else "b") for i in range(190)]
    chosen = data("reasoning_gym:a,b", *tables)
    order = ProblemOrder([p.type for p in problems], weights=epoch_weights(chosen, problems), seed=0, shuffle=True)
    epoch = [order.index(i) for i in range(order.epoch_length)]
    assert Counter(problems[i].type for i in epoch) == {"a": 90, "b": 30}
    assert len(set(epoch)) == 120
    doubled = epoch_weights(data("reasoning_gym:a,b", *tables, type_weights={"b": 2.0}), problems)
    assert doubled["b"] == pytest.approx(0.6)
    assert doubled["a"] == pytest.approx(1.0)


def test_metadata_becomes_json() -> None:
    """Tuples and sets become lists; keys and unknown objects become text."""
    assert as_json({1: (2, {3}), "x": 4j, "y": float("inf")}) == {"1": [2, [3]], "x": "4j", "y": "inf"}


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the dataset and the package."""
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    with GymProcesses() as processes, pytest.raises(DatasetError) as caught:
        gym_problems(data("reasoning_gym:gcd"), processes, "reasoning_gym:gcd", seed=0)
    assert "reasoning_gym:gcd" in str(caught.value)
    assert "pip install" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def processes() -> Iterator[GymProcesses]:
    """Processes that all tests of this module share: the import of the library takes a second."""
    with GymProcesses() as started:
        yield started


@needs_library
def test_problems_depend_on_nothing_but_seed_part_and_table(processes: GymProcesses) -> None:
    """More problems, and other datasets beside them, keep the first ones. Other seeds and parts give others."""
    path = "reasoning_gym:easy"
    chosen = data(path, EASY)
    problems = gym_problems(chosen, processes, path, seed=0)
    assert problems == gym_problems(chosen, processes, path, seed=0)
    more = data("reasoning_gym:gcd,easy", GymSection(dataset="gcd", size=5), replace(EASY, size=180))
    beside = gym_problems(more, processes, "reasoning_gym:gcd,easy", seed=0)
    assert [problem for problem in beside if problem.type == "easy"][:100] == problems[:100]
    for other in (gym_problems(chosen, processes, path, seed=1),
                  gym_problems(chosen, processes, path, seed=0, part="heldout")):  # fmt: skip
        assert len({p.prompt for p in other} & {p.prompt for p in problems}) < 50


@needs_library
def test_a_problem_has_the_prompt_the_answer_and_what_its_scorer_needs(processes: GymProcesses) -> None:
    """The type is the name of the table. No prompt occurs twice, also in another part."""
    path = "reasoning_gym:easy"
    problems = gym_problems(data(path, EASY), processes, path, seed=0)
    assert len(problems) == len({problem.prompt for problem in problems}) == 150
    first = problems[0]
    assert first.type == "easy"
    assert first.extra[ORIGIN] == {
        "dataset": "chain_sum", "level": None, "settings": EASY.settings, "literal": "",
    }  # fmt: skip
    assert (first.extra["question"], first.extra["answer"]) == (first.prompt, first.answer)
    assert first.extra["metadata"]["num_terms"] == 2
    excluded = {problem.prompt for problem in problems}
    others = gym_problems(data(path, EASY), processes, path, seed=0, part="heldout", excluded=excluded)
    assert len(others) == 150
    assert excluded.isdisjoint(problem.prompt for problem in others)


@needs_library
def test_a_dataset_with_few_different_prompts_has_fewer_problems(processes: GymProcesses) -> None:
    """All 100 products of two digits are found, once each."""
    path = "reasoning_gym:few"
    problems = gym_problems(data(path, FEW), processes, path, seed=0)
    assert len({problem.prompt for problem in problems}) == len(problems)
    assert 90 < len(problems) <= 100


@needs_library
@pytest.mark.parametrize(
    ("table", "key"),
    [
        (GymSection(dataset="chain_sums"), "dataset"),
        (GymSection(dataset="aiw", settings={"task_types": ["cousins"]}), "settings"),
        (GymSection(dataset="chain_sum", settings={"max_term": 3}), "settings"),
        (GymSection(dataset="chain_sum", settings={"max_terms": 0}), "settings"),
        (GymSection(dataset="chain_sum", settings={"max_terms": "three"}), "settings"),
        (GymSection(dataset="chain_sum", settings={"min_digits": 1.5}), "settings"),
        (GymSection(dataset="chain_sum", settings={"size": 3}), "settings"),
        (GymSection(dataset="chain_sum", level=99), "level"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_wrong_table_is_refused_with_its_key(processes: GymProcesses, table: GymSection, key: str) -> None:
    """One line; a similar name is suggested."""
    path = f"reasoning_gym:gcd,{table.label}"
    with pytest.raises(DatasetError) as caught:
        gym_problems(data(path, GymSection(dataset="gcd", size=2), table), processes, path, seed=0)
    assert str(caught.value).startswith(f"data.reasoning_gym[1].{key}: ")
    assert "\n" not in str(caught.value)
    if "max_term" in table.settings:
        assert "did you mean max_terms?" in str(caught.value)


@needs_library
def test_an_unknown_name_in_data_train_is_refused(processes: GymProcesses) -> None:
    """A similar name is suggested."""
    with pytest.raises(DatasetError, match=r"reasoning_gym:chian_sum: .*did you mean chain_sum\?"):
        gym_problems(data("reasoning_gym:chian_sum"), processes, "reasoning_gym:chian_sum", seed=0)


@needs_library
def test_a_level_sets_the_ranges_of_the_curriculum_and_settings_replace_them(processes: GymProcesses) -> None:
    """Level 0 of chain_sum is easier than level 3."""
    found = processes.answers(
        [job("chain_sum", level=0, count=20), job("chain_sum", level=3, count=20),
         job("chain_sum", level=3, count=20, max_terms=2, min_terms=2)]
    )  # fmt: skip
    terms = []
    for one in found:
        assert isinstance(one, Generated)
        terms.append(max(entry.metadata["num_terms"] for entry in one.entries))
    assert terms[0] < terms[1]
    assert terms[2] == 2


@needs_library
def test_settings_that_are_names_of_a_choice_are_text(processes: GymProcesses) -> None:
    """The library has enumerations, also as elements of lists."""
    siblings, upper = processes.answers(
        [
            job("aiw", count=20, task_types=["siblings"], task_type_weights=[1.0]),
            job("word_sorting", transformation="uppercase"),
        ]
    )
    assert isinstance(siblings, Generated)
    assert isinstance(upper, Generated)
    assert {entry.metadata["task_type"] for entry in siblings.entries} == {"siblings"}
    assert all(entry.answer == entry.answer.upper() for entry in upper.entries if entry.answer is not None)


@needs_library
def test_a_process_that_ends_is_reported_with_its_last_words(processes: GymProcesses) -> None:
    """The error names the dataset; the generator of the gym runs in a process of its own."""
    with GymProcesses() as own, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasoning_gym, "BOOT", "import sys; sys.exit('no such disk')")
        with pytest.raises(DatasetError, match=r"gcd .*status 1: no such disk"):
            own.answers([job("gcd")])
    assert not isinstance(processes.answers([job("gcd")])[0], JobRefused)
