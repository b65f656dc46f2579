"""The policy and the games of the profile `wordle`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from profiles.environments.wordle import WORDS, Wordle, hint, marks
from profiles.wordle_maker.__main__ import games, tokenizer_of, write_games
from profiles.wordle_maker.games import FAVOURITES, HASTY, allowed, episode

WORDLE = Path(__file__).parents[2] / "profiles" / "wordle"
MAX_BYTES = 2_000_000


def test_the_files_have_at_most_two_megabytes() -> None:
    """Weights, tokenizer, games and model card together."""
    assert sum(path.stat().st_size for path in WORDLE.iterdir()) <= MAX_BYTES


def test_games_and_tokenizer_are_reproducible(tmp_path: Path) -> None:
    """The same seed gives the shipped files; no prompt is in both."""
    training, held_out = games()
    for name, own in (("train.jsonl", training), ("heldout.jsonl", held_out)):
        write_games(tmp_path / name, own)
        assert (tmp_path / name).read_bytes() == (WORDLE / name).read_bytes()
    assert not {one.prompt for one in training} & {one.prompt for one in held_out}
    shipped = json.loads((WORDLE / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(tokenizer_of(training, 0).to_str())["model"] == shipped["model"]


@pytest.mark.parametrize(
    ("guess", "secret", "expected"),
    [
        ("cat", "cat", ("yes", "yes", "yes")),
        ("bat", "cab", ("moved", "yes", "no")),
        ("nun", "nut", ("yes", "yes", "no")),
        ("too", "not", ("moved", "yes", "no")),
    ],
)
def test_a_letter_is_marked_as_often_as_the_secret_has_it(guess: str, secret: str, expected: tuple[str, ...]) -> None:
    """First those in their place, then those of other places, from left to right."""
    assert marks(guess, secret) == expected


def test_a_game_ends_with_the_secret_or_after_four_turns() -> None:
    """A word that is not in the list costs its turn; the reward is 1, or counts the letters in their place."""
    game = Wordle()
    game.reset("cat")
    assert game.step("b a t") == hint("bat", "cat") == "b no, a yes, t yes"
    assert game.reward == pytest.approx(0.2)
    assert game.step("x y z") == "no word"
    assert game.step("c a t") is None
    assert game.reward == 1.0
    game.reset("cat")
    assert [game.step("d i g") is None for _ in range(Wordle.turns)] == [False, False, False, True]


def test_a_hasty_pupil_mostly_guesses_the_word_of_the_turn() -> None:
    """Otherwise, its word is one that all marks allow."""
    rng, hasty, others = Random(1), 0, 0
    for problem in games()[0]:
        guesses = [line.replace(" ", "") for line in episode(problem, rng).split("\n")[::4]]
        guesses = [guess.partition("<")[0] for guess in guesses]
        said = [(guess, marks(guess, problem.answer)) for guess in guesses]
        for turn, guess in list(enumerate(guesses))[1:]:
            careful = guess in allowed(said[:turn])
            assert careful or guess == FAVOURITES[turn]
            hasty, others = hasty + (not careful), others + 1
    assert abs(hasty / others - HASTY) < 0.1
    assert set(FAVOURITES) <= set(WORDS)
