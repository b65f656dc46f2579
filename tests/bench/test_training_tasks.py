"""The tasks of whole training runs for all trainers, and their clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from attachments.graders import choice_correctness, math_eval
from bench.contenders import arithmetic_task as task
from bench.contenders import clotho_train, long_tail, tasks, training_task
from bench.contenders.arithmetic_task import ARITHMETIC
from bench.contenders.deferred_evaluation import EVALUATED, UPDATED
from bench.contenders.shapes import REAL_DIRECTORY
from bench.contenders.training_task import TrainingClock, TrainingEnded, slowed
from bench.runs import Record
from clotho.rewards import tag_format
from clotho.settings.model import Lora
from protocols.prompt import Problem
from protocols.sampling import Completion, SampleRequest, Sampling
from tests.e2e.pipeline_process import metrics, run
from training_run.profile.load import load_profile

ANSWERS = ("67", " 67 ", "+67", "067", "6 7", "-67", "B", "b", "(B)", "B)", "B.", "C", "A or B", "", "the cat")
FORMS = (
    "<think>so</think><answer>{}</answer>",
    "<think>so</think>\n<answer>{}</answer>\n",
    "<answer>{}</answer>",
    "<think></think><answer>{}</answer>",
    "<think>so</think><answer>{}",
    "<think>so<answer>{}</answer>",
    "<answer>{}</answer><think>so</think>",
    "<think>so</think><answer>1</answer><answer>{}</answer>",
    "<think>so</think> and <answer>{}</answer>",
    "{}",
)


@pytest.mark.parametrize("wanted", ["67", "-67", "B"])
def test_other_trainers_use_the_same_reward_rules(wanted: str) -> None:
    """The rules are duplicated because the contenders lack the dependencies of ours."""
    problem = Problem(prompt="Which? A) 67 B) 98 C) 48" if wanted == "B" else "What?", answer=wanted, type="")
    for text in (form.format(answer) for form in FORMS for answer in ANSWERS):
        assert task.has_format(text) == tag_format.reward(problem, text), text
        ours = [compute_advantages.reward(problem, text) for compute_advantages in (math_eval, choice_correctness)]
        assert [task.is_correct(text, wanted)] == [verdict for verdict in ours if verdict is not None], text


def test_every_answer_of_the_task_is_a_whole_number_or_a_letter() -> None:
    """These two rules cover the whole task."""
    asked = [*ARITHMETIC.training(), *ARITHMETIC.held_out()]
    assert all(task.NUMBER.fullmatch(one.answer) or one.answer in "ABCD" for one in asked)
    assert ARITHMETIC.accuracy([f"<answer>{one.answer}</answer>" for one in asked], asked) == 1.0


def test_the_task_of_other_trainers_equals_the_profile() -> None:
    """Adapter, token limit and reward weights."""
    profile = load_profile("local-m3", {})
    assert isinstance(profile.policy.method, Lora)
    assert (profile.policy.method.rank, profile.policy.method.effective_scale) == (ARITHMETIC.rank, ARITHMETIC.scale)
    assert profile.sampling.max_tokens == ARITHMETIC.max_tokens
    form, answer = (weight for weight, _ in ARITHMETIC.rewards)
    assert {reward.name: reward.weight for reward in profile.rewards} == {
        "format": form, "math_eval": answer, "choice_correctness": answer, "jaccard": 1.0
    }  # fmt: skip


ADDITION_TEXTS = (
    "132", "47 + 85 = 132.", "132.", "132.0", "132.5", "1,132", "The answer is **132**!", "-132", "131 or 132",
    "132 or 131", "", "no number", "x132", "132 apples", "47+85=132", "13 2",
)  # fmt: skip


def test_other_trainers_use_the_same_rule_for_sums() -> None:
    """The rule is duplicated because the contenders lack the dependencies of ours."""
    problem = Problem(prompt="47 + 85 =", answer="132", type="")
    ours = {text: math_eval.reward(problem, text, answer_in="last_number") for text in ADDITION_TEXTS}
    assert {text: tasks.is_right_sum(text, "132") for text in ADDITION_TEXTS} == ours
    assert set(ours.values()) == {0.0, 1.0}


def test_the_addition_task_of_other_trainers_equals_the_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Adapter, token limit, system message, problems and rewards."""
    monkeypatch.setenv(REAL_DIRECTORY, str(tmp_path))
    found, profile = tasks.addition(), load_profile("smollm2")
    assert isinstance(profile.policy.method, Lora)
    assert (found.rank, found.scale) == (profile.policy.method.rank, profile.policy.method.effective_scale)
    assert (found.max_tokens, found.system) == (profile.sampling.max_tokens, profile.data.system)
    assert [(reward.name, reward.answer_in) for reward in profile.rewards] == [("math_eval", "last_number")]
    assert [str(found.problems / "train.jsonl"), str(found.problems / "heldout.jsonl")] == [
        str(Path(profile.data.train).resolve()),
        str(Path(profile.data.heldout).resolve()),
    ]
    first = found.held_out()[0]
    assert found.messages(first)[-1] == {"role": "user", "content": first.prompt}


@pytest.mark.parametrize(
    ("accuracies", "interval", "floor", "updates"),
    [((0.5, 0.8, 0.91), 1, 0.0, 3), ((0.3, 0.1, 0.09), 1, 0.1, 3), ((0.5, 0.6, 0.95), 2, 0.0, 5)],
    ids=["target", "floor", "every second update, and the last"],
)
def test_training_ends_at_an_accuracy(accuracies: tuple[float, ...], interval: int, floor: float, updates: int) -> None:
    """At the target, or below the floor: a collapsed policy does not recover, and would take all of the time limit."""
    measured = iter(accuracies)
    clock = TrainingClock(
        evaluate=lambda: next(measured), target=0.9, updates=5, limit=1e9, interval=interval, floor=floor
    )
    clock.begin()
    for _ in range(updates - 1):
        clock.updated()
    with pytest.raises(TrainingEnded):
        clock.updated()
    assert (clock.metrics()["updates"], clock.metrics()["accuracy"]) == (updates, accuracies[-1])


def test_evaluation_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update takes one second, every evaluation a hundred."""
    now = [0.0]

    def evaluate() -> float:
        now[0] += 100
        return 0.0

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(training_task, "busy_seconds", lambda: 20.0 + now[0])
    clock = TrainingClock(evaluate=evaluate, target=0.9, updates=3, limit=1e9)
    clock.begin()
    for _ in range(2):
        now[0] += 1
        clock.updated()
    now[0] += 1
    with pytest.raises(TrainingEnded):
        clock.updated()
    assert clock.seconds == 3
    assert clock.metrics()["from_command"] == 23


def test_accuracy_need_not_be_measured() -> None:
    """For equal work, only time counts."""
    clock = TrainingClock(evaluate=None, target=None, updates=1, limit=1e9)
    clock.begin()
    with pytest.raises(TrainingEnded):
        clock.updated()
    assert "accuracy" not in clock.metrics()


def test_without_a_target_accuracy_is_measured_once() -> None:
    """After the last update."""
    clock = TrainingClock(evaluate=lambda: 0.7, target=None, updates=2, limit=1e9)
    clock.begin()
    clock.updated()
    assert clock.accuracy == 0.0
    with pytest.raises(TrainingEnded):
        clock.updated()
    assert clock.accuracy == 0.7


@pytest.mark.parametrize(("processor", "seconds"), [(0.0, 1e9), (1e9, 0.0)])
def test_training_ends_after_its_limit(processor: float, seconds: float) -> None:
    """In processor seconds or in seconds; the accuracy is measured then."""
    clock = TrainingClock(
        evaluate=lambda: 0.7, target=0.9, updates=5, interval=3, limit=processor, limit_seconds=seconds
    )
    clock.begin()
    with pytest.raises(TrainingEnded):
        clock.updated()
    assert (clock.done, clock.accuracy) == (1, 0.7)


def test_a_slow_reward_has_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits once for each completion; correctness is decided without the wait."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    slow = slowed(ARITHMETIC, 0.05)
    text = "<think>so</think><answer>4</answer>"
    assert [rate(text, "4") for _, rate in slow.rewards] == [rate(text, "4") for _, rate in ARITHMETIC.rewards]
    assert [weight for weight, _ in slow.rewards] == [weight for weight, _ in ARITHMETIC.rewards]
    assert slow.correct(text, "4") == 1.0
    assert waits == [0.05]


def recorded(accuracies: Mapping[int, float]) -> Record:
    """A run of three updates of one second each; the first starts two seconds after the run."""
    metrics = [
        {"step": step, "time/run": 2.0 + step, "time/update": 0.75, "time/wait_for_rollouts": 0.25}
        for step in (1, 2, 3)
    ]
    log = [{"event": EVALUATED, "step": step, "accuracy": accuracy} for step, accuracy in accuracies.items()]
    log += [{"event": UPDATED, "step": step, "time": f"1970-01-01T00:01:4{step}.500000Z"} for step in accuracies]
    return Record(metrics, [{"event": "checkpoint", "step": 3}, *log], {}, launched=98.0)


def test_seconds_end_at_the_first_update_that_reaches_the_target() -> None:
    """They start at the first prompt, or at process start."""
    found = clotho_train.summarise(recorded({1: 0.6, 2: 0.92, 3: 0.95}), 0.9)
    assert found == {"seconds": 2.0, "from_command": 4.5, "updates": 2.0, "accuracy": 0.92}


def test_seconds_cover_all_updates_if_none_reaches_the_target() -> None:
    """The accuracy is that of the last update."""
    found = clotho_train.summarise(recorded({1: 0.6, 3: 0.7}), 0.9)
    assert found == {"seconds": 3.0, "from_command": 5.5, "updates": 3.0, "accuracy": 0.7}
    assert clotho_train.summarise(recorded({}), None) == {"seconds": 3.0, "updates": 3.0}


class ImmediateSampler:
    """Completes every request at once, in reverse order."""

    async def groups(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, list[Completion]], None]:
        for position in reversed(range(len(requests))):
            yield position, [_completion(requests[position].sampling.max_tokens) for _ in requests[position].seeds]


def test_a_group_waits_for_the_completions_that_accompany_it() -> None:
    """Its own completions are unchanged, and the others have lengths of their own."""
    asked: list[SampleRequest] = []

    class Recording(ImmediateSampler):
        async def groups(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, list[Completion]], None]:
            asked.extend(requests)
            async for position, found in super().groups(requests):
                yield position, found

    async def ask() -> list[tuple[int, Any]]:
        sampler = long_tail.AccompaniedSampler(Recording(), median=16.0, sigma=1.02)  # type: ignore[arg-type]  # a fake
        return [(position, found) async for position, found in sampler.groups(requests)]

    requests = [SampleRequest(prompt=(1,), sampling=Sampling(max_tokens=48), seeds=seeds) for seeds in ((5, 6), (8,))]
    found = asyncio.run(ask())
    assert [(position, [len(one.tokens) for one in group]) for position, group in found] == [(1, [48]), (0, [48, 48])]
    others = asked[len(requests) :]
    assert [one.seeds for one in others] == [(5,), (6,), (8,)]
    assert [one.sampling.max_tokens for one in others] == [
        long_tail.length(seed, median=16.0, sigma=1.02, longest=long_tail.LONGEST) for seed in (5, 6, 8)
    ]
    assert all(one.sampling.ignore_eos for one in others)


def test_the_profile_of_the_long_tail_completes_a_batch(tmp_path: Path) -> None:
    """The generator that replaces that of the run is constructed with what a run gives its generator."""
    profile = str(clotho_train.PROFILES / "learn-long-tail.toml")
    flags = ("--steps", "1", "--learner.batch-size", "2", "--eval.problems", "2", "--server", "off")
    run(tmp_path / "run", "--profile", profile, *flags, small=())
    assert len(metrics(tmp_path / "run")) == 1


def _completion(tokens: int) -> Completion:
    return Completion(
        tokens=(7,) * tokens, logprobs=(0.0,) * tokens, versions=(0,) * tokens, text="", finish_reason="length"
    )
