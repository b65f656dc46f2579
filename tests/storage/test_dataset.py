"""Datasets: everything usable is read, everything else is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from clotho.storage.datasets import Columns, load_problems, split_heldout
from protocols.errors import DatasetError
from protocols.prompt import Problem

GOOD = '{"prompt": "1+1?", "answer": "2", "type": "sum"}'


def write(tmp_path: Path, contents: str | bytes) -> Path:
    """A dataset with these contents."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


def load(tmp_path: Path, contents: str | bytes, columns: Columns | None = None) -> list[Problem]:
    """Problems of a file with these contents."""
    return load_problems(write(tmp_path, contents), columns=columns or Columns())


def refusal(tmp_path: Path, contents: str | bytes, columns: Columns | None = None) -> str:
    """Why a file with these contents is refused, after the directory's name."""
    with pytest.raises(DatasetError) as caught:
        load(tmp_path, contents, columns)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_lines_and_lists_give_the_same_problems(tmp_path: Path) -> None:
    """With a byte order mark, blank lines and either kind of line end."""
    expected = [Problem(prompt="1+1?", answer="2", type="sum")] * 2
    assert load(tmp_path, f"{GOOD}\n{GOOD}\n") == expected
    assert load(tmp_path, f"\ufeff\n\n{GOOD}\r\n   \r\n{GOOD}") == expected
    assert load(tmp_path, f"\ufeff [\n{GOOD},\n{GOOD}]") == expected


def test_a_line_may_hold_unusual_characters(tmp_path: Path) -> None:
    """A line ends at a line feed and nowhere else: U+2028 is part of a prompt."""
    assert load(tmp_path, '{"prompt": "a\u2028b\u0085c", "answer": "é"}')[0].prompt == "a\u2028b\u0085c"


def test_columns_can_be_renamed_and_types_defaulted(tmp_path: Path) -> None:
    """Other datasets call them question and answer."""
    found = load(tmp_path, '{"question": "q", "answer": "a"}', Columns(prompt="question", default_type="gsm"))
    assert found == [Problem(prompt="q", answer="a", type="gsm")]


@pytest.mark.parametrize(("value", "text"), [("7", "7"), ("2.50", "2.5"), ("-1e3", "-1000.0"), ("true", "true")])
def test_answers_that_are_no_text_become_text(tmp_path: Path, value: str, text: str) -> None:
    """As JSON writes them."""
    assert load(tmp_path, f'{{"prompt": "q", "answer": {value}}}')[0].answer == text


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    """Line 731 of a thousand, counted as an editor counts."""
    lines = [GOOD] * 1000
    lines[730] = '{"prompt": "q", "answer": '
    assert refusal(tmp_path, "\n".join(lines)).startswith("data.jsonl:731: not JSON: ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "q", "anwser": "a"}', "no key 'answer', only 'prompt', 'anwser'; did you mean data.answer_key"),
        ('{"text": "q"}', "no key 'prompt', only 'text'; name the column in data.prompt_key"),
        ("{}", "no key 'prompt', only none"),
        ('{"prompt": " ", "answer": "a"}', "prompt is empty"),
        ('{"prompt": [{"role": "user"}], "answer": "a"}', "prompt must be text (no chat messages), not a list"),
        ('{"prompt": "q", "answer": null}', "answer must be text or a number, not null"),
        ('{"prompt": "q", "answer": ["a"]}', "answer must be text or a number, not a list"),
        ('{"prompt": "q", "answer": "a", "type": 3}', "type must be text, not a number"),
        ('"prompt"', "a JSON object is expected, not text"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(tmp_path: Path, line: str, words: str) -> None:
    """File, line, key and what was found there; in a list, the item."""
    assert f"data.jsonl:2: {words}" in refusal(tmp_path, f"{GOOD}\n{line}")
    assert f"data.jsonl: item 2: {words}" in refusal(tmp_path, f"[{GOOD}, {line}]")


def test_files_without_problems_are_refused(tmp_path: Path) -> None:
    """Missing, a directory, empty, blank, an empty list, a broken list, no UTF-8, nested beyond reason."""
    with pytest.raises(DatasetError, match=r"nowhere\.jsonl does not exist"):
        load_problems(tmp_path / "nowhere.jsonl", columns=Columns())
    with pytest.raises(DatasetError, match="cannot be read"):
        load_problems(tmp_path, columns=Columns())
    for empty in ("", "\n \n", "[]", "\ufeff"):
        assert "is empty" in refusal(tmp_path, empty)
    assert "begins like a JSON list" in refusal(tmp_path, f"[{GOOD}")
    assert "data.jsonl:1: not JSON" in refusal(tmp_path, b'{"prompt": "\xff"}')
    assert "data.jsonl" in refusal(tmp_path, '{"a":' * 100_000)


def test_the_held_out_part_is_disjoint_complete_and_a_function_of_the_seed() -> None:
    """Rounded up; both parts in the file's order."""
    problems = [Problem(prompt=str(index), answer="", type="t") for index in range(25)]
    split, again = split_heldout(problems, 0.1, seed=3), split_heldout(problems, 0.1, seed=3)
    assert split == again
    assert split != split_heldout(problems, 0.1, seed=4)
    assert len(split.heldout) == 3
    assert sorted((*split.train, *split.heldout), key=problems.index) == problems
    assert list(split.train) == sorted(split.train, key=problems.index)
    assert split_heldout(problems, 0.0, seed=3).heldout == ()


def test_too_few_problems_to_split_are_refused() -> None:
    """One problem cannot be both trained on and held out."""
    with pytest.raises(DatasetError, match="too few"):
        split_heldout([Problem(prompt="q", answer="a", type="t")], 0.1, seed=0)
