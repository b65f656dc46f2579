"""Order of problems: the held-out split, epochs, and weights of types."""

from __future__ import annotations

from collections import Counter

import pytest

from protocols.errors import DatasetError
from protocols.prompt import Problem
from training_run.groups.order import ProblemOrder, split_heldout


def order_of(problems: int, *, seed: int, shuffle: bool) -> ProblemOrder:
    """The order of this number of problems without weights."""
    return ProblemOrder(["t"] * problems, weights={}, seed=seed, shuffle=shuffle)


def test_the_split_is_disjoint_complete_and_a_function_of_the_seed() -> None:
    """The held-out count is rounded up; both parts keep the order of the file."""
    problems = [Problem(prompt=str(index), answer="", type="t") for index in range(25)]
    split, again = split_heldout(problems, 0.1, seed=3), split_heldout(problems, 0.1, seed=3)
    assert split == again
    assert split != split_heldout(problems, 0.1, seed=4)
    assert len(split.heldout) == 3
    assert sorted((*split.train, *split.heldout), key=problems.index) == problems
    assert list(split.train) == sorted(split.train, key=problems.index)
    assert split_heldout(problems, 0.0, seed=3).heldout == ()


def test_a_split_without_training_problems_is_refused() -> None:
    """One problem cannot be split."""
    with pytest.raises(DatasetError, match="too few"):
        split_heldout([Problem(prompt="q", answer="a", type="t")], 0.1, seed=0)


def test_every_epoch_has_every_problem_once_in_a_different_order() -> None:
    """The permutation depends only on seed and epoch."""
    order = order_of(50, seed=1, shuffle=True)
    first, second = ([order.index(epoch * 50 + i) for i in range(50)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert [order_of(50, seed=2, shuffle=True).index(i) for i in range(50)] != first


def test_the_order_is_a_pure_function() -> None:
    """A resumed run maps a group id to the same problem."""
    order, fresh = order_of(7, seed=1, shuffle=True), order_of(7, seed=1, shuffle=True)
    forwards = [order.index(group_id) for group_id in range(70)]
    assert [fresh.index(group_id) for group_id in reversed(range(70))] == forwards[::-1]


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    """In every epoch."""
    order = order_of(3, seed=1, shuffle=False)
    assert [order.index(group_id) for group_id in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="at least one"):
        order_of(0, seed=1, shuffle=True)


TYPES = ["easy"] * 4 + ["hard"] * 3
WEIGHTS = {"easy": 0.5, "hard": 2.0}


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
def test_weights_change_how_often_the_problems_of_a_type_occur(shuffle: bool) -> None:
    """Weight 2: twice in every epoch. Weight 0.5: every problem once in two epochs."""
    order = ProblemOrder(TYPES, weights=WEIGHTS, seed=1, shuffle=shuffle)
    assert order.epoch_length == 2 + 6
    epochs = [[order.index(8 * epoch + place) for place in range(8)] for epoch in range(4)]
    for epoch in epochs:
        assert Counter(TYPES[index] for index in epoch) == {"easy": 2, "hard": 6}
        assert {count for index, count in Counter(epoch).items() if TYPES[index] == "hard"} == {2}
    halves = [{index for index in epoch if TYPES[index] == "easy"} for epoch in epochs]
    assert halves[0] | halves[1] == halves[2] | halves[3] == {0, 1, 2, 3}
    assert (epochs[0] == sorted(epochs[0])) != shuffle


def test_a_type_of_weight_zero_is_not_trained_on() -> None:
    """A weight of an unknown type, and weights that leave no problem, are refused."""
    order = ProblemOrder(TYPES, weights={"easy": 0.0}, seed=1, shuffle=True)
    assert {order.index(place) for place in range(9)} == {4, 5, 6}
    for weights in ({"esay": 1.0}, {"easy": 0.0, "hard": 0.0}):
        with pytest.raises(DatasetError, match=r"data\.type_weights"):
            ProblemOrder(TYPES, weights=weights, seed=1, shuffle=True)


def test_the_types_of_many_problems_are_read_once() -> None:
    """A type that is an id or a free text makes as many types as problems."""
    compared = 0

    class Kind(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    kinds = [Kind(index) for index in range(500)]
    order = ProblemOrder([*kinds, *kinds], weights={}, seed=0, shuffle=False)
    assert [order.index(group_id) for group_id in range(1000)] == list(range(1000))
    assert compared < 10 * len(kinds)
