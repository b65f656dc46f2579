"""From groups to what is learned from them: whose advantages, and what belongs to each completion."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from clotho.scoring.sequences import TrainingSequence
from clotho.training.batch import Division, compute_advantages, training_sequence
from protocols.rollout import ScoredGroup, TeacherTokens
from tests.learner_settings import learner_settings
from tests.training.environment_groups import with_completions
from tests.training.policies_and_groups import completion, scored_group


def judged(groups: list[ScoredGroup], *penalties: list[float], **keys: Any) -> list[list[list[float]]]:
    """Advantages of all tokens, by default the reward less its group's mean."""
    settings = learner_settings(**({"advantage": "mean"} | keys))
    return [
        [row.tolist() for row in rows]
        for rows in compute_advantages(groups, [np.array(one) for one in penalties], settings)
    ]


def test_a_muted_completion_has_no_advantage_though_its_reward_counts() -> None:
    """Rewards 3 0 0, mean 1; the first has zero_advantage: exactly 0. The others are below the mean."""
    group = replace(scored_group([[3], [4, 5], [6]], [3.0, 0.0, 0.0]), zero_advantage=(True, False, False))
    assert judged([group]) == [[[0.0], [-1.0, -1.0], [-1.0]]]


def test_a_muted_completion_has_no_advantage_of_its_own_either() -> None:
    """Nor one of a reward that a penalty spoilt."""
    group = replace(
        scored_group([[3], [4]], [1.0, 0.0]), zero_advantage=(True, False), token_advantages=((2.0,), (3.0,))
    )
    assert judged([group]) == [[[0.0], [3.0]]]
    spoilt = judged([replace(group, token_advantages=())], [math.nan, 0.0])
    assert spoilt[0][0] == [0.0]
    assert math.isnan(spoilt[0][1][0])


@pytest.mark.parametrize("kind", ["group", "mean", "leave_one_out", "batch", "batch_centred", "batch_scaled"])
def test_token_advantages_take_the_place_of_rewards_for_their_group_alone(kind: str) -> None:
    """The others are judged as if that group were not there, over the batch as well."""
    plain = [scored_group([[3], [4]], [1.0, 0.0]), scored_group([[5], [6]], [4.0, 2.0], group_id=1)]
    own = replace(scored_group([[3, 4], [5]], [90.0, -7.0], group_id=2), token_advantages=((0.5, -1.0), (2.0,)))
    alone = judged(plain, advantage=kind)
    assert judged([plain[0], own, plain[1]], advantage=kind) == [alone[0], [[0.5, -1.0], [2.0]], alone[1]]


def test_a_batch_of_nothing_but_token_advantages_has_no_rewards_to_judge() -> None:
    """Whitening over no group at all is no error."""
    own = replace(scored_group([[3]], [1.0]), token_advantages=((0.5,),))
    assert judged([own], advantage="batch") == [[[0.5]]]


def test_every_group_must_bring_them_where_the_profile_says_so() -> None:
    """Under `environment` rewards say nothing."""
    own = replace(scored_group([[3]], [1.0]), token_advantages=((0.5,),))
    with pytest.raises(ValueError, match="group 4 has no token advantages"):
        judged([own, scored_group([[3]], [1.0], group_id=4)], advantage="environment")


def test_penalties_are_those_of_the_groups_that_are_judged_by_rewards() -> None:
    """Each its own; that of a group with advantages of its own is not looked at, finite or not."""
    own = replace(scored_group([[3], [4]], [1.0, 0.0], group_id=1), token_advantages=((0.5,), (0.25,)))
    other = scored_group([[5], [6]], [4.0, 2.0], group_id=2)
    assert judged([own, other], [math.nan, 0.0], [1.0, 3.0]) == [[[0.5], [0.25]], [[2.0], [-2.0]]]


def test_tokens_that_were_not_drawn_have_no_advantage() -> None:
    """Of rewards or of their own; what is given for them need not even be a number."""
    one = replace(completion([3, 4, 5], [-1.0, 0.0, -1.0]), sampled=(True, False, True))
    group = with_completions(scored_group([[3], [4]], [1.0, 0.0]), [one, completion([6], [-1.0])])
    assert judged([group]) == [[[0.5, 0.0, 0.5], [-0.5]]]
    own = replace(group, token_advantages=((1.0, math.nan, 2.0), (3.0,)))
    assert judged([own]) == [[[1.0, 0.0, 2.0], [3.0]]]


def sequence(group: ScoredGroup, i: int = 0, **keys: Any) -> TrainingSequence:
    """A completion as the learner takes it, all advantages 1, coefficient 0.5."""
    advantage_T = np.ones(len(group.group.completions[i].tokens))
    return training_sequence(0, group, i, advantage_T, 0.5, learner_settings(**keys))


def test_weight_and_coefficient_of_what_was_not_drawn_are_zero() -> None:
    """The others have their share."""
    one = replace(completion([3, 4, 5], [-1.0, 0.0, -1.0]), sampled=(True, False, True))
    made = sequence(with_completions(scored_group([[3]], [1.0]), [one]))
    assert (made.loss_mask_T.tolist(), made.loss_weight_T.tolist()) == ([1.0, 0.0, 1.0], [0.5, 0.0, 0.5])


def test_a_group_without_a_reference_is_refused_where_it_is_learnt_from() -> None:
    """By name; without a penalty nobody misses it."""
    group = scored_group([[3]], [1.0], group_id=17)
    with pytest.raises(ValueError, match="group 17 has no reference log-probabilities"):
        sequence(group, kl_beta=0.1, reference="environment")
    assert sequence(group, reference="environment").reference_T is None
    assert sequence(replace(group, reference_logprobs=((-1.0,),)), kl_beta=0.1).reference_T is None


def test_what_a_teacher_says_becomes_shares_of_its_alternatives() -> None:
    """Probabilities 1/2 and 1/4: shares 2/3 and 1/3; minus infinity has none, and so have tokens not sampled."""
    half, quarter, never = math.log(0.5), math.log(0.25), -math.inf
    teacher = TeacherTokens(
        tokens=((8, 9), (8, 9), (7, 6), (5, 4)),
        logprobs=((half, quarter), (half, quarter), (never, quarter), (never, never)),
    )
    one = replace(completion([3, 4, 5, 6], [-1.0] * 4), sampled=(True, False, True, True))
    group = with_completions(scored_group([[3]], [1.0]), [one], teacher=(teacher,))
    rows = sequence(group, distillation_weight=0.1).teacher
    assert rows is not None
    assert rows.token_T_K.tolist() == [[8, 9], [-1, -1], [-1, 6], [-1, -1]]
    np.testing.assert_allclose(rows.share_T_K, np.array([[2, 1], [0, 0], [0, 3], [0, 0]]) / 3, rtol=1e-6)
    assert sequence(group).teacher is None


def test_groups_with_teachers_of_different_sizes_come_together_and_apart_from_others() -> None:
    """Rows as wide as the widest; those without a teacher have a micro-batch of their own."""
    groups = [scored_group([[3, 4], [5]], [1.0, 0.0], group_id=g) for g in range(3)]
    for g, count in ((0, 1), (1, 3)):
        tokens = tuple(range(8, 8 + count))
        teacher = [TeacherTokens(tokens=(tokens,) * n, logprobs=((-1.5,) * count,) * n) for n in (2, 1)]
        groups[g] = replace(groups[g], teacher=tuple(teacher))
    settings = learner_settings(distillation_weight=0.1, layout="padded")
    (mini,) = Division(settings, 9, "padded").minibatches(groups, compute_advantages(groups, (), settings))
    without, taught = mini.micro_batches
    assert {mini.origins[member][0] for member in without.members} == {2}
    assert without.table.teacher is None
    assert not without.table.teacher_mask_N.any()
    assert taught.table.teacher is not None
    assert (taught.table.teacher_mask_N * taught.table.loss_mask_N).sum() == 6
    for n in range(6):
        group, _ = mini.origins[taught.members[taught.table.sequence_N[n]]]
        expected = [8, -1, -1] if group == 0 else [8, 9, 10]
        assert taught.table.teacher.token_T_K[n].tolist() == expected
    assert not taught.table.teacher.share_T_K[6:].any()


@pytest.mark.parametrize("least", [3, 9])
def test_a_minibatch_is_cut_into_as_many_micro_batches_as_are_needed(least: int) -> None:
    """Down to one completion each, of whatever lengths they are."""
    group = scored_group([[3] * 64, [4, 5], [6, 7]], [1.0, 0.0, 0.5])
    division = Division(learner_settings(micro_batch_tokens=1000), max_tokens=64, layout="padded", least=least)
    assert len(division.micro_batches([sequence(group, i) for i in range(3)])) == 3
