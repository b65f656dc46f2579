"""Which prompts and completions come together where prompts are shared."""

from __future__ import annotations

import numpy as np

from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.layouts.shared_prefix import KEYS_PER_TOKEN, SharedInputs
from clotho.scoring.sequences import MicroBatch, TrainingSequence
from tests.scoring.layouts.reference_scores import random_sequences


def shared(sequences: list[TrainingSequence], budget: int) -> list[tuple[MicroBatch, SharedInputs]]:
    """Micro-batches with their inputs."""
    batches = build_micro_batches(sequences, layout="shared", budget=budget)
    return [(micro, micro.inputs) for micro in batches if isinstance(micro.inputs, SharedInputs)]


def test_prompts_and_completions_by_hand() -> None:
    """Prompt of two tokens; completions of three tokens and of one, which has no row."""
    long, short = random_sequences(((2, (3, 1)),))
    ((micro, inputs),) = shared([short, long], 100)
    assert micro.members == (1, 0)
    assert inputs.tokens_F_P.tolist() == [[*long.prompt, *[0] * 6]]
    assert inputs.tokens_B_C.tolist() == [[*long.tokens[:2], *[0] * 6]]
    assert (inputs.length_F.tolist(), inputs.prompt_B.tolist()) == ([2], [0])
    assert micro.table.position_N[:4].tolist() == [1, 8, 9, 1]


def test_completions_of_one_token_need_no_second_pass() -> None:
    """The prompt predicts all of them."""
    ((micro, inputs),) = shared(random_sequences(((2, (1, 1)), (3, (1,)))), 100)
    assert inputs.tokens_B_C.shape == (0, 0)
    assert sorted(micro.table.position_N[:3].tolist()) == [2, 9, 9]


def test_a_family_stays_together_where_it_fits() -> None:
    """Families of 8 + 3 * 8 tokens, a budget of 80: two at a time, and none is cut to fill what is left."""
    batches = shared(random_sequences(((8, (5, 5, 5)),) * 5), 80)
    assert [inputs.tokens_F_P.shape[0] for _, inputs in batches] == [2, 2, 1]
    assert [micro.sequences for micro, _ in batches] == [6, 6, 3]


def test_a_family_that_does_not_fit_computes_its_prompt_once_per_micro_batch() -> None:
    """A budget of 8 + 2 * 8: pairs of completions, longest first."""
    batches = shared(random_sequences(((8, (5, 4, 3, 2, 1)),)), 24)
    assert [micro.members for micro, _ in batches] == [(0, 1), (2, 3, 4)]
    assert all(inputs.tokens_F_P.shape == (1, 8) for _, inputs in batches)


def test_the_same_prompt_in_two_groups_is_computed_once() -> None:
    """What counts is the prompt, not where it comes from."""
    first, second = random_sequences(((4, (5,)), (4, (5,))))
    ((_, inputs),) = shared([first, second._replace(prompt=first.prompt)], 100)
    assert inputs.tokens_F_P.shape[0] == 1


def test_completions_of_a_long_prompt_are_bounded_by_the_keys_that_they_attend_to() -> None:
    """Each has its own copy: 40 short completions of a prompt of 512 tokens fit the tokens, but not the keys."""
    budget = 1024
    batches = shared(random_sequences(((512, (5,) * 40),)), budget)
    keys = [inputs.tokens_B_C.shape[0] * (512 + 8) for _, inputs in batches]
    assert len(batches) > 1
    assert max(keys) <= KEYS_PER_TOKEN * budget


def test_like_lengths_come_together() -> None:
    """Long prompts with long prompts where prompts differ most, long completions where those do."""
    by_prompt = shared(random_sequences(((200, (5,)), (8, (6,)), (200, (5,)), (8, (6,)))), 450)
    assert [inputs.tokens_F_P.shape for _, inputs in by_prompt] == [(2, 208), (2, 8)]
    by_completion = shared(random_sequences(((40, (90,)), (30, (5,)), (20, (90,)), (10, (5,)))), 280)
    assert [np.prod(inputs.tokens_B_C.shape) for _, inputs in by_completion] == [2 * 96, 2 * 8]
