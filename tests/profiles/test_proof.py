"""The problems, demonstrations and rewards of the profiles `proof-*`."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from attachments.stages.sections import STAGES
from bench.studies.proof import DEMONSTRATED, TASKS
from clotho.rewards.registry import RewardOptions, load_reward
from profiles.calculator_maker.problems import WORDS
from profiles.countdown.__main__ import solutions
from profiles.countdown.reward import solved
from profiles.customer.__main__ import HASTY
from profiles.environments.customer import Customer
from profiles.reverse_text.reward import similarity
from protocols.prompt import Problem
from training_run.profile.load import load_profile

PROFILES = Path(__file__).parents[2] / "profiles"
TOOL = {word: tool for tool, words in WORDS.items() for word in words}
FOLDERS = [name.replace("-", "_") for name in TASKS]


def records(folder: str, name: str) -> list[dict[str, Any]]:
    """Read a shipped file."""
    return [json.loads(line) for line in (PROFILES / folder / name).read_text(encoding="utf-8").splitlines()]


def numbers(record: dict[str, Any]) -> tuple[int, ...]:
    """Return the numbers of a problem of Countdown, sorted."""
    return tuple(sorted(map(int, re.findall(r"\d+", record["prompt"])[:-1])))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_files_of_a_task_can_be_made_again(folder: str, tmp_path: Path) -> None:
    """Byte for byte, with the default seed."""
    if folder == "chain_sum":
        pytest.importorskip("reasoning_gym")
    import_module(f"profiles.{folder}.__main__").make(tmp_path, 0)
    for name in sorted(path.name for path in tmp_path.iterdir()):
        assert (tmp_path / name).read_bytes() == (PROFILES / folder / name).read_bytes()


def test_no_held_out_problem_is_trained() -> None:
    """No text and no first question occurs twice.

    No three numbers of Countdown are in both files, whatever their order and target.
    """
    texts = [one["prompt"] for name in ("train.jsonl", "heldout.jsonl") for one in records("reverse_text", name)]
    assert len(set(texts)) == len(texts) == 1024 + 128
    trained, held_out = ([*map(numbers, records("countdown", name))] for name in ("train.jsonl", "heldout.jsonl"))
    assert (len(trained), len(held_out)) == (1024, 128)
    assert not {*trained} & {*held_out}
    questions = [one["prompt"] for name in ("train.jsonl", "heldout.jsonl") for one in records("customer", name)]
    assert len(set(questions)) == len(questions) == 1024 + 128
    files = ("train.jsonl", "heldout.jsonl", "demonstrations.jsonl")
    sums = [one["prompt"] for name in files for one in records("chain_sum", name)]
    assert len(set(sums)) == len(sums) == 1024 + 128 + 1024


def test_the_chance_of_countdown_is_that_of_its_card() -> None:
    """Of the seven choices of signs with a number that is added, on average over the held-out problems."""
    held_out = records("countdown", "heldout.jsonl")
    found = [solutions(numbers(one), int(one["prompt"].split()[-1])) for one in held_out]
    chance = sum(map(len, found)) / (7 * len(held_out))
    assert f"| {chance:.2f}:" in (PROFILES.parent / "docs" / "known-tasks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", ["reverse-text", "countdown"])
def test_demonstrations_earn_every_reward(task: str) -> None:
    """So do the answers of held-out problems, which makes 1 the ceiling of the accuracy."""
    profile, folder = load_profile(f"proof-{task}"), task.replace("-", "_")
    rewards = [load_reward(one.name, RewardOptions(answer_in=one.answer_in or "tags")) for one in profile.rewards]
    found = [*records(folder, "train.jsonl"), *records(folder, "heldout.jsonl")]
    for one in found:
        problem = Problem(prompt=one["prompt"], answer=one["answer"])
        completion = one.get("completion", f"#### {one['answer']}" if task == "countdown" else one["answer"])
        assert all(reward(problem, completion) == 1.0 for reward in rewards)


@pytest.mark.parametrize("task", TASKS)
def test_the_stages_are_those_of_the_study(task: str) -> None:
    """Its table reads the accuracy after the demonstrations at their last step."""
    first, second = STAGES.of(load_profile(f"proof-{task}"))
    assert (first.kind, first.steps, second.kind) == ("sft", DEMONSTRATED, "rl")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("#### 7+12-3", 1.0),
        ("steps #### (12 - 3) + 7", 1.0),
        ("#### 12*7/3", 0.1),
        ("7+12-3", 0.0),
        ("#### 7+12", 0.0),
        ("#### 7+12-3-3", 0.0),
        ("#### 12/(7-7)-3", 0.0),
        ("#### 3**7**12", 0.0),
        ("#### print(3, 7, 12)", 0.0),
        ("#### 3+7+", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_rewards_expressions_of_all_numbers(completion: str, reward: float) -> None:
    """Each number is used once, with + - * / and parentheses; nothing else is evaluated."""
    assert solved(Problem(prompt="3, 7, 12; target 16"), completion) == reward


def test_countdown_rewards_no_division_by_zero() -> None:
    """It is no expression with a value."""
    assert solved(Problem(prompt="3, 7, 7; target 3"), "#### 3/(7-7)") == 0.0


def test_all_sums_and_differences_with_the_value_are_solutions() -> None:
    """Equal numbers give one solution for each choice of what is subtracted."""
    assert solutions((3, 7, 12), 16) == ["7+12-3"]
    assert solutions((5, 13, 5), 13) == ["5+13-5", "13+5-5"]
    assert solutions((1, 2, 3), 7) == []


@pytest.mark.parametrize(
    ("completion", "value"), [("ib ir", 1.0), (" ib ir\n", 1.0), ("ib", 4 / 7), ("xyz", 0.0), ("", 0.0)]
)
def test_the_reward_of_a_reversed_text_is_its_similarity(completion: str, value: float) -> None:
    """Twice the matching characters, divided by the characters of both texts."""
    assert similarity(Problem(prompt="ri bi", answer="ib ir"), completion) == pytest.approx(value)


def operations(record: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the tool and the number of each change that the customer asks for."""
    texts = [record["prompt"].removesuffix("?"), *record["changes"]]
    return [(TOOL[word], int(number)) for text in texts for word, number in [text.split()[-2:]]]


def test_the_customer_rewards_the_right_amount_after_the_last_change() -> None:
    """The tools that the words mean lead to it, and each answer leads to the next question."""
    for one in records("customer", "heldout.jsonl"):
        customer, value, question = Customer(), int(one["prompt"].split()[2]), one["prompt"]
        customer.reset(one["answer"], one["changes"])
        for tool, number in operations(one):
            assert question.startswith(f"What is {value} ")
            value = getattr(customer, tool)(value, number)
            question = customer.step(f"{value}\n")
        assert (question, customer.reward) == (None, 1.0)


def test_the_customer_believes_a_wrong_amount() -> None:
    """The next question is about it. The reward at the end is then 0."""
    customer = Customer()
    customer.reset("9", ["minus 12"])
    assert customer.step("20") == "What is 20 minus 12?"
    assert (customer.step("8"), customer.reward) == (None, 0.0)


def test_a_message_that_is_no_amount_ends_the_conversation() -> None:
    """Its reward is 0, also if the amount at the end is empty."""
    customer = Customer()
    customer.reset("9", ["minus 12"])
    assert (customer.step("[add(a=1"), customer.reward) == (None, 0.0)


def test_demonstrations_of_the_customer_are_conversations_with_results_of_the_tools() -> None:
    """The pupil answers with the result of its call; half of the calls add whatever is meant."""
    added, all_calls = 0, 0
    for one in records("customer", "demonstrations.jsonl"):
        roles, texts = zip(*((message["role"], message["content"]) for message in one["messages"]), strict=True)
        assert roles == ("user", "assistant", "tool", "assistant") * (len(roles) // 4)
        for question, call, result, answer in zip(*(texts[place::4] for place in range(4)), strict=True):
            name, first, second = re.findall(r"\[(\w+)\(a=(-?\d+), b=(\d+)\)\]", call)[0]
            assert result == answer == str(getattr(Customer(), name)(int(first), int(second)))
            meant = TOOL[question.split()[-2]]
            assert name in ("add", meant)
            added += name == "add" != meant
            all_calls += meant != "add"
    assert abs(added / all_calls - HASTY) < 0.05


def test_demonstrations_of_chain_sum_earn_every_reward() -> None:
    """They have the form, and the answer of the dataset."""
    rewards = [load_reward(name, RewardOptions(answer_in="tags")) for name in ("format", "math_eval")]
    for one in records("chain_sum", "demonstrations.jsonl"):
        problem = Problem(prompt=one["prompt"], answer=one["answer"])
        assert [reward(problem, one["completion"]) for reward in rewards] == [1.0, 1.0]
