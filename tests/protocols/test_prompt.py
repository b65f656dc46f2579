"""Seeds are pure functions, and a prompt names its group."""

from __future__ import annotations

from protocols.prompt import Problem, Prompt, group_seed, placeholder_prompt
from protocols.sampling import completion_seeds, derive


def test_equal_paths_give_equal_seeds_and_different_paths_do_not() -> None:
    """A resumed run draws what the uninterrupted one would have sampled."""
    assert derive(1, "a", 2) == derive(1, "a", 2)
    assert len({derive(s, w, i) for s in range(3) for w in "ab" for i in range(50)}) == 300


def test_completions_of_a_group_have_seeds_of_their_own_that_fit_64_bits() -> None:
    """Otherwise a group would be one completion repeated."""
    seeds = completion_seeds(group_seed(0, 7), 64)
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[:8] == completion_seeds(group_seed(0, 7), 8)


def test_the_prompt_of_a_group_without_contents_names_group_and_environment() -> None:
    """It has no tokens: the group is only counted."""
    nothing = Problem(prompt="", answer="", type="words")
    assert placeholder_prompt(7, "words") == Prompt(group_id=7, problem=nothing, tokens=(), seed=0, source="words")
