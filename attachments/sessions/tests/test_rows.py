"""Rows of tokens: which answers continue one, and what of it is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from attachments.sessions.rows import TOKEN_BYTES, SessionRow, common_prefix, trajectories
from attachments.sessions.tests.recorded import row, sample
from tests.fakes import CharacterTokenizer

FIRST = sample((1, 2), (3, 4))


@pytest.mark.parametrize(
    ("prompt", "fields", "expected"),
    [
        ((1, 2, 3, 4), {}, True), ((1, 2, 3, 4, 5), {}, True), ((1, 2, 3), {}, False), ((1, 2, 9, 4), {}, False),
        ((1, 2, 3, 9), {}, False), ((1, 2, 3, 4, 5), {"temperature": 0.5}, False),
        ((1, 2, 3, 4, 5), {"supports": True}, False),
    ],
)  # fmt: skip
def test_a_prompt_continues_a_row_that_it_begins_with(
    prompt: tuple[int, ...], fields: dict[str, Any], expected: bool
) -> None:
    """If the learner can evaluate both in one sequence: with one temperature, and with all or no supports."""
    found = SessionRow(*FIRST)
    found.add(*FIRST)
    assert found.continues_with(*sample(prompt, (6,), **fields)) == expected


class SpellingTokenizer(CharacterTokenizer):
    """Some texts have several spellings, and token 9 is a control token."""

    TEXTS: ClassVar = {1: "a", 2: "b", 3: "c", 4: "d", 12: "ab", 34: "cd", 41: "da", 9: "<control>"}

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:
        """Return the texts."""
        return "".join(self.TEXTS[token] for token in tokens if token != 9 or not skip_special_tokens)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ((1, 2, 3, 4, 2), (1, 2, 3, 4, 2)), ((12, 34, 2, 1), (1, 2, 3, 4, 2, 1)), ((1, 2, 34), (1, 2, 3, 4)),
        ((1, 2, 3), ()), ((1, 2, 3, 3, 1), ()), ((12, 3, 41), ()),
    ],
)  # fmt: skip
def test_a_prompt_with_the_text_of_a_row_gets_its_tokens(prompt: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """If one of the tokens of the prompt ends where the row ends."""
    found = SessionRow(*FIRST)
    found.add(*FIRST)
    assert found.as_sampled(prompt, SpellingTokenizer()) == expected


def test_control_tokens_within_an_answer_are_not_missed_in_the_text_of_a_prompt() -> None:
    """The text of answers has none; the end token, and those of prompts, are in the text of the next prompt."""
    answer = sample((1, 9, 2), (3, 9, 4, 9))
    found = SessionRow(*answer)
    found.add(*answer)
    assert found.as_sampled((1, 9, 2, 34, 9, 1), SpellingTokenizer()) == (1, 9, 2, 3, 9, 4, 9, 1)
    assert found.as_sampled((1, 2, 3, 4, 9, 1), SpellingTokenizer()) == ()


def test_a_sequence_trains_on_its_answers_and_keeps_how_they_were_sampled() -> None:
    """Other tokens are context: their log-probability is 0, and their version that of the token before."""
    answers = row(sample((1, 2), (3, 4), supports=True), sample((1, 2, 3, 4, 5), (6,), supports=True))
    (whole,) = trajectories(answers)
    completion = whole.completion(1, decode=str, reward=0.5)
    assert completion.tokens == (2, 3, 4, 5, 6)
    assert completion.sampled == (False, True, True, False, True)
    assert completion.logprobs == (0.0, -0.3, -0.4, 0.0, -0.6)
    assert completion.versions == (2, 2, 3, 3, 5)
    assert completion.supports == (b"", b"s", b"s", b"", b"s")
    assert completion.reward == 0.5
    assert completion.length == 3


def test_a_sequence_has_the_routes_that_first_computed_its_tokens() -> None:
    """Of all tokens but the last; later answers of the row do not change them, and one without routes ends them."""
    turns = [sample((1, 2), (3, 4), route=7), sample((1, 2, 3, 4, 5), (6,), route=8)]
    answers = row(*turns, sample((1, 2, 3, 4, 5, 6), (9,), route=9))
    for count, expected in ((1, b"\7" * 3), (2, b"\7" * 3 + b"\10" * 2)):
        (found,) = trajectories(answers[:count])
        routes = found.completion(1, decode=str, reward=1.0).routes
        assert routes is not None
        assert routes.experts == expected
    assert answers[0].completion.routes is None
    (found,) = trajectories(row(*turns, sample((1, 2, 3, 4, 5, 6), (9,))))
    assert found.completion(1, decode=str, reward=1.0).routes is None


def test_kept_bytes_are_those_of_tokens_supports_and_routes() -> None:
    """Of a row, and of a sequence up to one of its answers, which keeps the routes of its row."""
    turns = [sample((1, 2), (3, 4), route=7, supports=True), sample((1, 2, 3, 4, 5), (6,), route=8, supports=True)]
    answers = row(*turns)
    assert answers[0].row.size == 6 * TOKEN_BYTES + 3 + 5
    (found,) = trajectories(answers[:1])
    assert found.size == 4 * TOKEN_BYTES + 2 + 5


def test_a_sequence_ends_with_its_last_answer() -> None:
    """What was sampled later in its row is not part of it; what was sampled before is context."""
    first, second, _ = row(FIRST, sample((1, 2, 3, 4, 5), (6,)), sample((1, 2, 3, 4, 5, 6, 7), (8,)))
    (found,) = trajectories([first])
    assert found.completion(2, decode=str, reward=1.0).sampled == ()
    (found,) = trajectories([second])
    assert found.completion(2, decode=str, reward=1.0).sampled == (False, False, False, True)


def test_the_common_prefix_ends_before_the_first_sampled_token() -> None:
    """Of all sequences of a group."""
    one, other = (trajectories(row(sample(prompt, (3,)))) for prompt in ((1, 2, 2), (1, 2, 2, 3, 4)))
    assert common_prefix([*one, *other]) == 3
    assert common_prefix([*one, *trajectories(row(sample((1, 9), (3,))))]) == 1
