"""Datasets: reading, errors with file and line, held-out split, order of problems."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clotho.storage import datasets
from clotho.storage.datasets import Columns, ProblemOrder, load_problems, split_heldout
from protocols.errors import DatasetError
from protocols.prompt import Problem

GOOD = '{"prompt": "1+1?", "answer": "2", "type": "sum"}'


def write(tmp_path: Path, contents: str | bytes) -> Path:
    """Write a dataset file."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


def load(tmp_path: Path, contents: str | bytes, columns: Columns | None = None) -> list[Problem]:
    """Load a dataset with these contents."""
    return load_problems(write(tmp_path, contents), columns=columns or Columns())


def refusal(tmp_path: Path, contents: str | bytes, columns: Columns | None = None) -> str:
    """Return the error message for these contents, without the directory."""
    with pytest.raises(DatasetError) as caught:
        load(tmp_path, contents, columns)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_lines_and_lists_give_the_same_problems(tmp_path: Path) -> None:
    """Also with a byte order mark, blank lines and CRLF."""
    expected = [Problem(prompt="1+1?", answer="2", type="sum")] * 2
    assert load(tmp_path, f"{GOOD}\n{GOOD}\n") == expected
    assert load(tmp_path, f"\ufeff\n\n{GOOD}\r\n   \r\n{GOOD}") == expected
    assert load(tmp_path, f"\ufeff [\n{GOOD},\n{GOOD}]") == expected


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """U+2028 and U+0085 are part of a prompt."""
    assert load(tmp_path, '{"prompt": "a\u2028b\u0085c", "answer": "é"}')[0].prompt == "a\u2028b\u0085c"


def test_columns_can_be_renamed_and_types_defaulted(tmp_path: Path) -> None:
    """For datasets with other column names."""
    found = load(tmp_path, '{"question": "q", "answer": "a"}', Columns(prompt="question", default_type="gsm"))
    assert found == [Problem(prompt="q", answer="a", type="gsm")]


@pytest.mark.parametrize(("value", "text"), [("7", "7"), ("2.50", "2.5"), ("-1e3", "-1000.0"), ("true", "true")])
def test_answers_that_are_not_text_become_json_text(tmp_path: Path, value: str, text: str) -> None:
    """Numbers and booleans."""
    assert load(tmp_path, f'{{"prompt": "q", "answer": {value}}}')[0].answer == text


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    """Line numbers start at 1."""
    lines = [GOOD] * 1000
    lines[730] = '{"prompt": "q", "answer": '
    assert refusal(tmp_path, "\n".join(lines)).startswith("data.jsonl:731: not valid JSON: ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "q", "anwser": "a"}', "no key 'answer', only 'prompt', 'anwser'; did you mean data.answer_key"),
        ('{"text": "q"}', "no key 'prompt', only 'text'; set data.prompt_key"),
        ("{}", "no key 'prompt', only none"),
        ('{"prompt": " ", "answer": "a"}', "prompt is empty"),
        ('{"prompt": [{"role": "user"}], "answer": "a"}', "prompt must be text (not chat messages), not a list"),
        ('{"prompt": "q", "answer": null}', "answer must be text or a number, not null"),
        ('{"prompt": "q", "answer": ["a"]}', "answer must be text or a number, not a list"),
        ('{"prompt": "q", "answer": "a", "type": 3}', "type must be text that is not empty, not a number"),
        ('"prompt"', "must be a JSON object, not text"),
    ],
)
def test_an_invalid_record_is_refused_with_the_reason(tmp_path: Path, line: str, words: str) -> None:
    """The message has file, line (or item), key and value type."""
    assert f"data.jsonl:2: {words}" in refusal(tmp_path, f"{GOOD}\n{line}")
    assert f"data.jsonl: item 2: {words}" in refusal(tmp_path, f"[{GOOD}, {line}]")


def test_files_without_problems_are_refused(tmp_path: Path) -> None:
    """Missing, a directory, empty, blank, an invalid list, invalid UTF-8, deep nesting."""
    with pytest.raises(DatasetError, match=r"nowhere\.jsonl does not exist"):
        load_problems(tmp_path / "nowhere.jsonl", columns=Columns())
    with pytest.raises(DatasetError, match="cannot be read"):
        load_problems(tmp_path, columns=Columns())
    for empty in ("", "\n \n", "[]", "\ufeff"):
        assert "is empty" in refusal(tmp_path, empty)
    assert "starts like a JSON list" in refusal(tmp_path, f"[{GOOD}")
    assert "data.jsonl:1: not valid JSON" in refusal(tmp_path, b'{"prompt": "\xff"}')
    assert "data.jsonl" in refusal(tmp_path, '{"a":' * 100_000)


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
    order = ProblemOrder(50, seed=1, shuffle=True)
    first, second = ([order.index(epoch * 50 + i) for i in range(50)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert [ProblemOrder(50, seed=2, shuffle=True).index(i) for i in range(50)] != first


def test_the_order_is_a_pure_function() -> None:
    """A resumed run maps a group id to the same problem."""
    order, fresh = ProblemOrder(7, seed=1, shuffle=True), ProblemOrder(7, seed=1, shuffle=True)
    forwards = [order.index(group_id) for group_id in range(70)]
    assert [fresh.index(group_id) for group_id in reversed(range(70))] == forwards[::-1]


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    """In every epoch."""
    order = ProblemOrder(3, seed=1, shuffle=False)
    assert [order.index(group_id) for group_id in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="at least 1"):
        ProblemOrder(0, seed=1, shuffle=True)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "socket", "link to itself", "link to a pipe"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    """A pipe would wait for a writer, and /dev/zero has no end."""
    path = tmp_path / "data.jsonl"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path)[-100:] if len(str(path)) < 100 else os.path.relpath(path))
        case "link to itself":
            path.symlink_to(path)
        case _:
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to(tmp_path / "pipe")
    with pytest.raises(DatasetError) as caught:
        load_problems(path, columns=Columns())
    assert "data.jsonl" in str(caught.value)


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000, "~nobody-has-this-name/x"], ids=["nul", "long", "home"])
def test_paths_that_name_no_file_are_refused(path: str) -> None:
    """The operating system rejects them with various exceptions."""
    with pytest.raises(DatasetError):
        load_problems(path, columns=Columns())


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the file, bytes of a line, and keys of a record; the line is named."""
    sparse = tmp_path / "sparse.jsonl"
    sparse.touch()
    os.truncate(sparse, datasets.MAX_BYTES + 1)
    with pytest.raises(DatasetError):
        load_problems(sparse, columns=Columns())
    many = json.dumps({str(key): 0 for key in range(100_000)})
    message = refusal(tmp_path, f"{GOOD}\n{many}\n")
    assert message.startswith("data.jsonl:2: ")
    assert len(message) < 300
    monkeypatch.setattr(datasets, "MAX_LINE_BYTES", 1000)
    assert refusal(tmp_path, f"{GOOD}\n{'x' * 1001}\n").startswith("data.jsonl:2: ")


@pytest.mark.parametrize("count", [1, 900])
def test_messages_about_keys_are_short(tmp_path: Path, count: int) -> None:
    """Keys from the file are shortened, and only some are shown."""
    message = refusal(tmp_path, json.dumps({f"{key}\x1b[2J" + "k" * (5_000_000 // count): 0 for key in range(count)}))
    assert len(message) < 700
    assert "\x1b" not in message


def test_answers_may_be_integers_of_any_size(tmp_path: Path) -> None:
    """Their digits are the text."""
    digits = "-" + "9" * 400
    assert load(tmp_path, f'{{"prompt": "q", "answer": {digits}}}')[0].answer == digits


RECORD_PIECES = st.sampled_from(
    ["{", "}", "[", "]", ",", ":", '"', "prompt", '"prompt"', '"answer"', '"a"', "1", "-", "1e999", "9" * 400, "null",
     "true", "\\u0000", "\x00", "\n", "\ufeff", " ", "NaN", "[" * 2000, GOOD]
)  # fmt: skip
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["prompt", "answer", "type", "x"]), inner)
    ),
    max_leaves=8,
)


def read_or_refuse(directory: Path, contents: bytes) -> None:
    """Any contents give problems or one line that names the file."""
    path = write(directory, contents)
    try:
        assert load_problems(path, columns=Columns())
    except DatasetError as error:
        message = str(error)
        assert len(message.splitlines()) == 1
        assert str(path) in message
        assert len(message) < len(str(path)) + 700


CONTENTS = (
    st.binary(max_size=60)
    | st.lists(RECORD_PIECES, max_size=12).map(lambda pieces: "".join(pieces).encode())
    | st.lists(JSON, max_size=4).map(lambda records: "\n".join(map(json.dumps, records)).encode())
    | JSON.map(lambda value: json.dumps(value).encode())
)


@given(contents=CONTENTS)
def test_any_contents_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, contents: bytes) -> None:
    """Bytes, pieces of JSON and records of wrong types cause no other exception."""
    read_or_refuse(tmp_path_factory.getbasetemp(), contents)


@pytest.mark.slow
@settings.get_profile("many")
@given(contents=CONTENTS)
def test_many_contents_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, contents: bytes) -> None:
    """The same with 20,000 files."""
    read_or_refuse(tmp_path_factory.getbasetemp(), contents)
