"""A set of integers as ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from training_run.directory.integer_set import IntegerSet

NUMBERS = st.lists(st.integers(-12, 12))


@given(NUMBERS, NUMBERS)
def test_it_has_the_numbers_and_the_differences_of_a_set(ours: list[int], theirs: list[int]) -> None:
    """In ascending order, whatever the order in which they are added."""
    found, other = IntegerSet(ours), IntegerSet(theirs)
    assert list(found) == sorted(set(ours))
    assert len(found) == len(set(ours))
    assert list(found - other) == sorted(set(ours) - set(theirs))


@given(NUMBERS)
def test_a_number_is_new_once(numbers: list[int]) -> None:
    """`add` says whether the set had it."""
    found = IntegerSet()
    assert [found.add(number) for number in numbers] == [
        number not in numbers[:at] for at, number in enumerate(numbers)
    ]


def test_neighbours_need_no_memory() -> None:
    """Numbers that arrive a little out of order, as the groups of a run do, become one range."""
    found = IntegerSet(number ^ 7 for number in range(80_000))
    assert str(found) == "0-79999"
    assert found.ranges == 1


def test_the_text_has_few_ranges() -> None:
    """And the number of the others."""
    assert str(IntegerSet([1, 3, 4, 5])) == "1, 3-5"
    assert str(IntegerSet(range(100, 140, 2))) == "100, 102, 104, 106, 108 and 15 more"
    assert str(IntegerSet()) == ""
