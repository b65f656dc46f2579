# ruff: noqa: RUF001
r"""The library Math-Verify as a reward; texts as real models write them."""

from __future__ import annotations

import gc
import signal
import sys

import pytest

from attachments.graders import math_verify
from clotho.rewards.registry import RewardFunction, RewardOptions, load_reward
from protocols.errors import ProfileError
from protocols.prompt import AnswerIn, Problem
from protocols.rollout import ScoredGroup
from tests.rewards.groups import answered, group, problem
from training_run.profile.data import RewardSection
from training_run.rewards.runner import RewardRunner


@pytest.fixture(scope="module")
def rewards() -> dict[AnswerIn, RewardFunction]:
    """The function for every place of the answer."""
    places: tuple[AnswerIn, ...] = ("tags", "boxed", "hashes", "text")
    return {place: load_reward("math_verify", RewardOptions(answer_in=place)) for place in places}


@pytest.mark.parametrize(
    ("answer_in", "reference", "completion", "value"),
    [
        ("tags", "42", "<think>15 + 27</think><answer>42</answer>", 1.0),
        ("tags", "42", "<answer>The answer is **42**.</answer>", 1.0),
        ("tags", "42", "<answer>43</answer>", 0.0),
        ("tags", "42", "<answer>41</answer> No. <answer>42</answer>", 1.0),
        ("tags", "42", "<answer>42", 0.0),
        ("tags", "1234", "<answer>1,234</answer>", 1.0),
        ("tags", "-5", "<answer>−5</answer>", 1.0),
        ("tags", "42", "<answer>42 apples</answer>", 1.0),
        ("tags", "0.5", r"<answer>50\%</answer>", 1.0),
        ("tags", "1/2", r"<answer>$\frac{1}{2}$</answer>", 1.0),
        ("tags", r"\frac{1}{2}", "<answer>0.5</answer>", 1.0),
        ("boxed", r"\frac{1}{2}", r"Therefore, $$x = \boxed{\dfrac{1}{2}}.$$", 1.0),
        ("boxed", r"\frac{\sqrt{2}}{2}", r"The value is $\boxed{\frac{1}{\sqrt{2}}}$.", 1.0),
        ("boxed", r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1.0),
        ("boxed", r"2\sqrt{3}", r"\boxed{\sqrt{11}}", 0.0),
        ("boxed", "x^2 + 2x + 1", r"\boxed{(x+1)^2}", 1.0),
        ("boxed", r"x^2 + 2x + 1", r"\boxed{(x-1)^2}", 0.0),
        ("boxed", "x = 3", r"\boxed{3}", 1.0),
        ("boxed", "3", r"\boxed{x = 3}", 1.0),
        ("boxed", r"(-\infty, 2]", r"\boxed{(-\infty,2]}", 1.0),
        ("boxed", r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1.0),
        (
            "boxed",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}",
            1.0,
        ),
        ("boxed", "90^\\circ", r"The angle is \boxed{90^\circ}.", 1.0),
        ("boxed", "12", r"\boxed{12 \text{ cm}^2}", 1.0),
        ("boxed", "7", r"First \boxed{5}, after the correction \boxed{7}", 1.0),
        ("boxed", "7", r"<think>\boxed{7}</think> I do not know.", 0.0),
        ("boxed", "7", r"<think>It is \boxed{7}", 0.0),
        ("hashes", "18", "9 * 2 = 18\n#### $18", 1.0),
        ("text", "42", "Adding both numbers, the final answer is $42$. I hope it is correct.", 1.0),
        ("text", r"\frac{3}{4}", r"<think>a</think>So the probability is \(\frac{3}{4}\).", 1.0),
    ],
)
def test_realistic_completions(
    rewards: dict[AnswerIn, RewardFunction], answer_in: AnswerIn, reference: str, completion: str, value: float
) -> None:
    """Equal expressions are correct in any notation."""
    assert rewards[answer_in](problem(reference), completion) == value


@pytest.mark.parametrize("answer", ["15 + 27", "$15 + 27$", r"\frac{84}{2}", "6*7"])
def test_an_unevaluated_expression_is_wrong_if_the_reference_is_a_number(
    rewards: dict[AnswerIn, RewardFunction], answer: str
) -> None:
    """Otherwise, a copy of the question would have the same reward as its result."""
    assert rewards["tags"](problem("42"), answered(answer)) == 0.0


@pytest.mark.parametrize("reference", ["Paris", "New York", "", "the cat sat", "x" * 3000])
def test_the_reward_does_not_apply_to_free_text(rewards: dict[AnswerIn, RewardFunction], reference: str) -> None:
    """SymPy would read a word as a product of its letters."""
    assert rewards["tags"](problem(reference), answered("42")) is None


def test_the_reward_does_not_apply_to_the_letter_of_an_option(rewards: dict[AnswerIn, RewardFunction]) -> None:
    """`choice_correctness` does."""
    question = Problem(prompt="Which? A) 1 B) 2", answer="B", type="choice")
    assert rewards["tags"](question, answered("B")) is None


@pytest.mark.parametrize(
    "answer",
    ["9**9**9", "9^{9^{9}}", "10^{1000000}", "100000!", "9" * 5000, "(" * 3000, r"\frac{" * 500, r"\sqrt{" * 300,
     "$" * 2000, r"\boxed{" * 300, "{" * 2000, "\ud800", "4\x002", "1/0", r"\frac{1}{0}", "nan", "\\"],
)  # fmt: skip
def test_an_answer_without_a_value_or_beyond_the_limits_is_wrong(
    rewards: dict[AnswerIn, RewardFunction], answer: str
) -> None:
    """Nothing raises, and no call takes longer than its share of CPU time."""
    assert rewards["tags"](problem("42"), answered(answer)) == 0.0


def test_an_answer_that_takes_too_long_is_wrong(
    rewards: dict[AnswerIn, RewardFunction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts CPU time, so that a busy machine does not change a reward. The signal handler is restored."""
    before = signal.getsignal(signal.SIGVTALRM)
    monkeypatch.setattr(math_verify, "CPU_SECONDS", 1e-6)
    long_sum = "+".join(f"\\sqrt{{x+{i}}}" for i in range(60))
    gc.disable()  # an exception in a callback of the collector is a warning, which ends the test
    try:
        assert rewards["boxed"](problem(long_sum), f"\\boxed{{{long_sum}}}") == 0.0
    finally:
        gc.enable()
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, before training."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ProfileError, match=r"clotho\[math-verify\]"):
        load_reward("math_verify")


@pytest.mark.slow
async def test_the_function_runs_in_worker_processes() -> None:
    """Its limits need the main thread of a process."""
    runner = RewardRunner((RewardSection(name="math_verify", answer_in="boxed"),))
    try:
        await runner.start()
        scored = await runner.score(group(r"\boxed{\frac{84}{2}}", r"\boxed{42}", r"\boxed{9^{9^9}}"))
    finally:
        runner.close()
    assert isinstance(scored, ScoredGroup)
    assert scored.rewards == (0.0, 1.0, 0.0)
