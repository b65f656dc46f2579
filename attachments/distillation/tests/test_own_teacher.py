"""Self-distillation: which completions have the policy with a hint as their teacher, and what they learn."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from attachments.distillation.own_teacher import HintedPrompts, feedback
from attachments.distillation.scoring import TeacherScoring
from attachments.distillation.sections import HINT, DistillationSection
from attachments.distillation.teacher import TeacherScores, Tokens
from attachments.distillation.tests.teachers import EMBEDDED
from attachments.distillation.tests.test_distillation_runs import words
from clotho.models.tokenizer import ChatTokenizer
from clotho.training.batch import Division, compute_advantages
from protocols.rollout import GroupOutcome, RolloutGroup, ScoredGroup
from protocols.sampling import CompletionTurn
from tests.e2e.pipeline_process import adapter, continued, metrics, run
from tests.learner_settings import learner_settings
from tests.rewards.groups import answered, group

TOKENIZER = ChatTokenizer.from_files(EMBEDDED)


def scored(*correct: bool | None) -> ScoredGroup:
    """Return a group with completions that say their number."""
    found = group(*(answered(str(i)) for i in range(len(correct))))
    return ScoredGroup(group=found, rewards=tuple(float(bool(one)) for one in correct), parts={}, correct=correct)


def texts(prompts: HintedPrompts, of: ScoredGroup) -> list[str | None]:
    """Return the prompts of a group as texts."""
    return [None if one is None else TOKENIZER.decode(one) for one in prompts(of)]


def prompts(hint: str = HINT, *, context_length: int = 1024) -> HintedPrompts:
    """Return prompts with the tokenizer of the embedded policy."""
    return HintedPrompts(hint, TOKENIZER, system="", context_length=context_length)


def test_failed_completions_are_read_with_a_correct_one_of_their_group() -> None:
    """Correct completions, and those that no reward judges, have no teacher; a group without any solution has none."""
    found = texts(prompts(), scored(False, True, None, False))
    assert [one is not None for one in found] == [True, False, False, True]
    assert found[0] is not None
    assert "What is 15 + 27?" in found[0]
    assert answered("1") in found[0]
    assert prompts()(scored(False, False)) == [None, None]
    assert prompts(context_length=8)(scored(False, True)) == [None, None]


def test_a_hint_can_be_the_answer_or_what_the_environment_said() -> None:
    """Without such a message, a completion has no hint that contains it."""
    assert "It is 42." in str(texts(prompts("It is {answer}."), scored(False))[0])
    plain = scored(False)
    assert prompts("{feedback}")(plain) == [None]
    (completion,) = plain.group.completions
    parts = ((True, "print(1"), (False, "SyntaxError"), (True, "print(2)"))
    turns = tuple(CompletionTurn(sampled=by, tokens=1, characters=len(text)) for by, text in parts)
    told = replace(completion, turns=turns, text="".join(text for _, text in parts))
    assert feedback(told) == "SyntaxError"
    found = texts(prompts("{feedback}"), replace(plain, group=replace(plain.group, completions=(told,))))
    assert "SyntaxError" in str(found[0])


class Rewards:
    """Rewards that say which of four completions are correct."""

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Return the first as failed."""
        return replace(scored(False, True), group=group)


class Fixed:
    """A teacher that gives every token the same log-probability."""

    retries = 0

    async def score(self, prompt: Tokens, completions: list[Tokens]) -> list[TeacherScores]:
        """Score the completions."""
        return [
            TeacherScores(
                logprobs=(-0.25,) * len(one),
                best=(((3, -0.25), (4, -2.0)),) * len(one),
                entropies=tuple(0.5 * t for t in range(len(one))),
            )
            for one in completions
        ]


@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl"])
async def test_correct_completions_learn_from_rewards_and_failed_ones_from_the_teacher(loss: str) -> None:
    """SRPO's routing: a completion has an advantage from rewards or a teacher, and not both."""
    settings = DistillationSection(teacher="@policy", loss=loss)  # type: ignore[arg-type]
    scoring = TeacherScoring(Fixed(), settings, vocab_size=4, prompts=prompts())  # type: ignore[arg-type]
    found = await scoring.around(Rewards()).score(scored(False, True).group)
    assert isinstance(found, ScoredGroup)
    if loss == "forward_kl":
        best = found.teacher[0]
        assert (best.tokens, best.logprobs) == (((3, 0),), ((-0.25, -inf),)), "the policy has no token 4"
    learner = learner_settings(distillation_weight=1.0)
    advantages = compute_advantages([found], (), learner)
    assert [float(np.abs(row_T).max()) > 0 for row_T in advantages[0]] == [False, True]
    (mini,) = Division(learner, 9, "padded").minibatches([found], advantages)
    taught = {
        mini.origins[micro.members[0]][1]: (micro.table.teacher_logp_N is not None, micro.table.teacher is not None)
        for micro in mini.micro_batches
    }
    assert taught == {0: (loss == "reverse_kl", loss == "forward_kl"), 1: (False, False)}


async def test_the_metrics_are_means_over_the_tokens_that_the_teacher_scored() -> None:
    """Of those that the policy sampled, since the last step."""
    settings = DistillationSection(teacher="@policy")
    scoring = TeacherScoring(Fixed(), settings, vocab_size=99, prompts=prompts()).around(Rewards())  # type: ignore[arg-type]
    assert isinstance(scoring, TeacherScoring)
    first, second = scored(False, True).group.completions
    told = replace(first, tokens=(1, 2), logprobs=(-0.5, 0.0), versions=(0, 0), sampled=(True, False))
    await scoring.score(replace(scored(False, True).group, completions=(told, second)))
    found = scoring.metrics()
    names = ("kl", "teacher_logprob", "taught", "retries", "failed")
    assert [found[f"distillation/{name}"] for name in names] == [-0.5 + 0.25, -0.25, 0.5, 0, 0]
    assert [scoring.metrics()[f"distillation/{name}"] for name in names] == [None, None, None, 0, 0]


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.5])
async def test_tokens_count_by_the_confidence_of_the_policy_as_its_teacher(beta: float) -> None:
    """SRPO's weights: exp(-beta H) over their mean, of the tokens with a teacher; others are as without them."""
    settings = DistillationSection(teacher="@policy", entropy_sensitivity=beta)
    scoring = TeacherScoring(Fixed(), settings, vocab_size=99, prompts=prompts())  # type: ignore[arg-type]
    found = await scoring.around(Rewards()).score(scored(False, True).group)
    assert isinstance(found, ScoredGroup)
    learner = learner_settings(distillation_weight=1.0)
    (mini,) = Division(learner, 9, "padded").minibatches([found], compute_advantages([found], (), learner))
    of_completion = {
        mini.origins[micro.members[0]][1]: micro.table.loss_weight_N[micro.table.loss_mask_N > 0]
        for micro in mini.micro_batches
    }
    raw_T = np.exp(-beta * 0.5 * np.arange(len(of_completion[0])))
    (plain,) = set(of_completion[1].tolist())
    assert of_completion[0].tolist() == pytest.approx((raw_T / raw_T.mean() * plain).tolist(), rel=1e-6)


def test_a_run_learns_from_itself_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """With the answer as the hint, all failed completions have a teacher."""
    flags = words("@policy", {"--distillation.hint": "The answer is {answer}."})
    whole = run(tmp_path / "whole", *flags, "--steps", "2", small=())
    assert whole.status == 0, whole.err
    found = metrics(tmp_path / "whole")
    assert all(0 < line["distillation/taught"] < 1 and line["distillation/kl"] is not None for line in found)
    resumed = continued(tmp_path / "whole", tmp_path / "run", *flags, "--steps", "2", step=1)
    assert resumed == adapter(tmp_path / "whole")
