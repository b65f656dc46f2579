"""How a batch looks: every scored group counts, and nothing is seen that is not there."""

from __future__ import annotations

import math

import msgspec

from clotho.monitoring.collapse_detection import batch_look, group_looks
from protocols.collapse import BatchStatistics
from tests.monitoring.reports import GOOD, completion, discarded, metrics, report, scored


def test_groups_that_taught_nothing_count_as_well() -> None:
    """A policy that fails everywhere has only such groups."""
    looks = list(group_looks(report([scored([1.0, 3.0])], [discarded(scored([0.0, 0.0]))])))
    assert [(look.reward, look.lowest) for look in looks] == [(2.0, 1.0), (0.0, 0.0)]
    look = batch_look(looks, report())
    assert (look.reward, look.reward_error) == (1.0, 1.0)  # deviation of (2, 0) is sqrt 2, over sqrt 2


def test_stale_groups_are_not_looked_at() -> None:
    """After a rollback they are those of the policy that was given up, which must not become what is normal."""
    stale = msgspec.structs.replace(discarded(scored([9.0, 9.0])), reason="stale")
    assert [look.reward for look in group_looks(report([scored([1.0])], [stale]))] == [1.0]


def test_groups_without_rewards_are_not_looked_at() -> None:
    """Neither those that failed before they were scored, nor those whose rewards are no numbers."""
    failed = msgspec.structs.replace(discarded(scored([1.0])), rewards=(), parts={})
    looks = list(group_looks(report([scored([math.nan, 1.0])], [failed])))
    assert looks == []
    assert batch_look(looks, report()) == BatchStatistics()


def test_length_and_truncation_are_those_of_the_completions() -> None:
    """Shares and means over the completions of a group."""
    (look,) = group_looks(report([scored([0.0, 1.0], None, [completion(2), completion(6, cut_off=True)])]))
    assert (look.length, look.truncated) == (4.0, 0.5)


def test_form_without_content_is_full_marks_for_form_and_none_for_all_else() -> None:
    """Components that do not apply, the penalty for length, and half marks for form are none of it."""
    parts = {
        "format": (1.0, 1.0, 0.5, 1.0),
        "exact": (0.0, 0.5, 0.0, None),
        "overlong": (0.0, 0.0, 0.0, -1.0),
        "math_eval": (None, None, None, None),
    }
    (look,) = group_looks(report([scored([0.0] * 4, parts)]))
    assert look.empty_form == 1 / 3  # the first of the three that content was judged of
    assert look.content == 1 / 3


def test_without_a_reward_for_form_or_for_content_there_is_nothing_to_compare() -> None:
    """Not looked at, rather than guessed."""
    for parts in ({"exact": (0.0,)}, {"format": (1.0,)}, {"format": (1.0,), "overlong": (0.0,)}, {}):
        (look,) = group_looks(report([scored([0.0], parts)]))
        assert (look.empty_form, look.content) == (None, None)


def test_an_update_that_was_skipped_says_nothing() -> None:
    """Its numbers may be anything."""
    skipped = report(update=metrics(GOOD, applied=False))
    assert batch_look((), skipped) == BatchStatistics()
    nan = report(update=metrics(GOOD._replace(entropy=math.nan)))
    assert batch_look((), nan).entropy is None
    assert batch_look((), nan).ess == GOOD.ess


def test_a_policy_moved_to_no_probabilities_at_all_was_moved_beyond_every_bound() -> None:
    """The update that destroys most must not be the one that nobody sees."""
    for value in (math.nan, math.inf):
        assert batch_look((), report(update=metrics(GOOD._replace(step_kl=value)))).step_kl == math.inf
    assert batch_look((), report(update=msgspec.structs.replace(metrics(GOOD), step_kl=None))).step_kl is None


def test_the_divergence_counts_only_where_a_penalty_has_it_computed() -> None:
    """Without a penalty it is reported as 0, which would look like an ideal."""
    assert batch_look((), report(update=metrics(GOOD, kl=0.5))).kl is None
    assert batch_look((), report(update=metrics(GOOD, kl=0.5, kl_beta=0.1))).kl == 0.5


def test_one_group_alone_has_no_error_to_speak_of() -> None:
    """Its mean may be anything."""
    looks = list(group_looks(report([scored([0.0, 1.0])])))
    assert batch_look(looks, report()).reward_error is None
