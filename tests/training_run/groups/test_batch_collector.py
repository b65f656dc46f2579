"""A batch while it forms: who counts, who is replaced, and when enough has been asked."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from msgspec.structs import replace

from protocols.rollout import Discarded, GroupOutcome, ScoredGroup
from tests.actors.actor_helpers import prompt
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import scored_group
from training_run.groups.batch_collector import BatchCollector, discard_unusable

GOOD = scored_group([[1], [2]], [0.0, 1.0])
LOST = Discarded(prompt=prompt(0), reason="zero_variance", detail="all rewards are equal")


def form(outcomes: str, *, limit: int, rounds: bool = False, size: int = 3) -> tuple[BatchCollector, list[int]]:
    """A batch that these outcomes came into, one after another, `+` or `-`; what each of them had it ask."""
    batch, asked = BatchCollector(size=size, limit=limit, rounds=rounds), []
    for outcome in outcomes:
        assert not batch.complete
        batch.add(GOOD if outcome == "+" else LOST)
        asked.append(batch.request_replacements())
    return batch, asked


def test_without_room_for_more_a_batch_is_so_many_groups_however_they_end() -> None:
    """Nothing is replaced, and that is no shortcoming."""
    batch, asked = form("---", limit=3)
    assert (asked, batch.complete, batch.limited) == ([0, 0, 0], True, False)


def test_every_loss_is_replaced_at_once() -> None:
    """Until as many as the batch wants can be learned from."""
    batch, asked = form("-++-+", limit=12)
    assert asked == [1, 0, 0, 1, 0]
    assert (batch.complete, batch.limited, batch.replaced, batch.requested) == (True, False, 2, 5)
    assert (len(batch.fresh), len(batch.discarded)) == (3, 2)


def test_in_rounds_losses_are_replaced_together_when_all_that_was_asked_has_ended() -> None:
    """3 asked, 2 lost: 2 more; 1 of them lost: 1 more."""
    batch, asked = form("--+-++", limit=12, rounds=True)
    assert asked == [0, 0, 2, 0, 1, 0]
    assert batch.complete


@pytest.mark.parametrize(("rounds", "asked"), [(False, [1, 1, 0, 0, 0]), (True, [0, 0, 2, 0, 0])])
def test_at_the_limit_it_is_taken_as_it_stands(rounds: bool, asked: list[int]) -> None:
    """Incomplete, and that is worth a warning."""
    batch, found = form("---+-", limit=5, rounds=rounds)
    assert found == asked
    assert (batch.complete, batch.limited, len(batch.fresh)) == (True, True, 1)


@pytest.mark.parametrize("rounds", [False, True])
def test_whatever_happens_it_completes_with_all_it_asked(rounds: bool) -> None:
    """With as many as it wanted to learn from, or with the limit reached, and never a group beyond."""
    for seed in range(50):
        complete_by_chance(random.Random(seed), rounds=rounds)


def complete_by_chance(chance: random.Random, *, rounds: bool) -> None:
    """Complete a batch of random size, limit and losses, and check its counts."""
    size, loss = chance.randint(1, 6), chance.random()
    limit = size + chance.randint(0, 12)
    batch = BatchCollector(size=size, limit=limit, rounds=rounds)
    in_flight = size
    while not batch.complete:
        assert in_flight > 0, "it waits for a group that nobody was asked for"
        batch.add(LOST if chance.random() < loss else GOOD)
        in_flight += batch.request_replacements() - 1
    assert (in_flight, batch.ended) == (0, batch.requested)
    assert len(batch.fresh) == size or batch.requested == limit
    assert len(batch.fresh) <= size <= batch.requested <= limit


def why(outcome: GroupOutcome, *, version: int = 0, oldest: int = 0, **keys: Any) -> tuple[str, str] | None:
    """Reason and detail with which a learner with these settings sorts a group out; None if it does not."""
    sorted_out = discard_unusable(outcome, version=version, settings=learner_settings(**keys), oldest=oldest)
    if sorted_out is outcome:
        return None
    assert isinstance(sorted_out, Discarded)
    assert isinstance(outcome, ScoredGroup)
    assert (sorted_out.completions, sorted_out.rewards) == (outcome.group.completions, outcome.rewards)
    return sorted_out.reason, sorted_out.detail


def test_what_is_too_old_is_sorted_out_with_the_reason() -> None:
    """By its oldest token; what was discarded before stays as it is."""
    old = scored_group([[1], [2]], [0.0, 1.0], version=3)
    assert why(LOST, version=9, max_staleness=0) is None
    assert why(old, version=5, max_staleness=2) is None
    assert why(old, version=6, max_staleness=2) == ("stale", "3 versions old, learner.max_staleness is 2")
    assert why(old, version=4, oldest=3) is None
    assert why(old, version=4, oldest=4) == ("stale", "sampled before a rollback")


def test_what_is_no_training_data_is_invalid() -> None:
    """Whichever stage it came from, it costs itself, not the run."""
    given = replace(GOOD, token_advantages=((1.0,), (-1.0,)))
    broken = replace(GOOD, token_advantages=((1.0,), (math.nan,)))
    assert why(scored_group([[], []], [0.0, 1.0])) == ("invalid", "no completion has a token")
    for reward in (math.inf, math.nan, -1e308):
        assert (why(scored_group([[1], [2]], [0.0, reward])) or ("",))[0] == "invalid"
    assert why(scored_group([[1], [2]], [0.0, -1e9])) is None
    assert why(given, advantage="environment") is None
    assert why(broken) is None
    assert why(broken, advantage="environment") == ("invalid", "a token advantage is not finite")
    assert (why(GOOD, advantage="environment") or ("",))[0] == "invalid"


@pytest.mark.parametrize(
    ("fields", "pair"),
    [
        ({}, True),
        ({"token_advantages": ((1.0,), (-1.0,))}, True),
        ({"token_advantages": ((1.0,), (0.0,))}, False),
        ({"token_advantages": ((1.0,), (-1.0,)), "zero_advantage": (False, True)}, False),
    ],
    ids=["of rewards", "given", "without a worse one", "one of them is silent"],
)
def test_objectives_of_pairs_need_a_better_and_a_worse_completion(fields: dict[str, Any], pair: bool) -> None:
    """Others would be compared with nothing; `kto` compares no completions."""
    assert ((why(replace(GOOD, **fields), objective="dpo") or ("",))[0] == "invalid") == (not pair)
    assert why(replace(GOOD, **fields), objective="kto") is None


def test_a_group_of_nothing_but_masked_completions_has_zero_variance() -> None:
    """It would be booked as learned from, replayed, and never replaced, though no token of it teaches anything."""
    completions = GOOD.group.completions
    cut_off = tuple(replace(completion, finish_reason="length") for completion in completions)
    masked = replace(GOOD, group=replace(GOOD.group, completions=cut_off))
    partly = replace(GOOD, group=replace(GOOD.group, completions=(cut_off[0], completions[1])))
    assert why(masked) is None
    assert why(partly, mask_truncated=True) is None
    assert (why(masked, mask_truncated=True) or ("",))[0] == "zero_variance"
