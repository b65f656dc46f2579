"""Functions that all environments use."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from profiles.environments import rollouts


def test_every_epoch_contains_each_problem_once_in_a_new_order(tmp_path: Path) -> None:
    """The iterator never ends."""
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i}?", "a": i}) + "\n\n" for i in range(20)))
    questions = rollouts.read_questions(str(path), question_key="q", answer_key="a")
    endless = rollouts.endless(questions, Random(0))
    first, second = list(islice(endless, 20)), list(islice(endless, 20))
    assert first != second
    assert {(one.text, one.answer) for one in first} == {(f"{i}?", f"{i}") for i in range(20)}
    assert sorted(one.text for one in first) == sorted(one.text for one in second)


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"q": "1?"}\n', "line 1: the column 'q' or 'a' is missing"), ("\n", "no problems"), ("[1]\n", "line 1")],
)
def test_the_error_names_an_unusable_file(tmp_path: Path, content: str, message: str) -> None:
    """The error contains the number of the line if one is invalid."""
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        rollouts.read_questions(str(path), question_key="q", answer_key="a")
    assert str(path) in str(caught.value)


def test_the_sampling_parameters_of_the_run_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from an environment variable. The defaults are temperature 1 and the length of the environment."""
    monkeypatch.delenv(rollouts.SAMPLING_VARIABLE, raising=False)
    assert rollouts.sampling(40) == {"temperature": 1.0, "max_tokens": 40}
    monkeypatch.setenv(
        rollouts.SAMPLING_VARIABLE, '{"temperature": 0.7, "top_p": 0.9, "max_tokens": 12, "min_p": null}'
    )
    assert rollouts.sampling(40) == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 12}


def test_a_conversation_starts_with_the_system_message() -> None:
    """An empty system message is left out."""
    asked = {"role": "user", "content": "2+2?"}
    assert rollouts.conversation("2+2?", "") == [asked]
    assert rollouts.conversation("2+2?", "Be brief.") == [{"role": "system", "content": "Be brief."}, asked]
