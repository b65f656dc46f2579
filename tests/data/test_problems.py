"""Problems: columns, conversations, answers, and errors with file and line."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from clotho.data import records
from clotho.data.problems import ProblemColumns, conversation, load_problems
from clotho.data.records import Source
from protocols.errors import DatasetError, RecordsError
from protocols.prompt import Problem
from training_run.groups.prompts import problems_fingerprint

GOOD = '{"prompt": "1+1?", "answer": "2", "type": "sum"}'


def write(tmp_path: Path, contents: str | bytes) -> Path:
    """Write a dataset file."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


def load(tmp_path: Path, contents: str | bytes, columns: ProblemColumns | None = None) -> list[Problem]:
    """Load a dataset with these contents."""
    return load_problems(Source(path=str(write(tmp_path, contents))), columns=columns or ProblemColumns())


def without_columns(found: list[Problem]) -> list[Problem]:
    """Return the problems without the columns of the file."""
    return [replace(problem, extra={}) for problem in found]


def read(path: str | Path) -> list[Problem]:
    """Load a dataset with the default columns."""
    return load_problems(Source(path=str(path)), columns=ProblemColumns())


def refusal(tmp_path: Path, contents: str | bytes, columns: ProblemColumns | None = None) -> str:
    """Return the error message for these contents, without the directory."""
    with pytest.raises(DatasetError) as caught:
        load(tmp_path, contents, columns)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_lines_and_lists_give_the_same_problems(tmp_path: Path) -> None:
    """Also with a byte order mark, blank lines and CRLF."""
    expected = [Problem(prompt="1+1?", answer="2", type="sum")] * 2
    for text in (f"{GOOD}\n{GOOD}\n", f"\ufeff\n\n{GOOD}\r\n   \r\n{GOOD}", f"\ufeff [\n{GOOD},\n{GOOD}]"):
        assert without_columns(load(tmp_path, text)) == expected


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """U+2028 and U+0085 are part of a prompt."""
    assert load(tmp_path, '{"prompt": "a\u2028b\u0085c", "answer": "é"}')[0].prompt == "a\u2028b\u0085c"


def test_columns_can_be_renamed_and_types_defaulted(tmp_path: Path) -> None:
    """For datasets with other column names."""
    found = load(tmp_path, '{"question": "q", "answer": "a"}', ProblemColumns(prompt="question", default_type="gsm"))
    assert without_columns(found) == [Problem(prompt="q", answer="a", type="gsm")]


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]


def test_a_conversation_is_the_prompt_up_to_the_last_message_of_the_user(tmp_path: Path) -> None:
    """In the column of messages or of the prompt. The assistant's last message is the answer if no column has one."""
    answered = [*TURNS, {"role": "assistant", "content": "4", "name": None}]
    expected = Problem(prompt="2+2?", answer="4", type="problem", messages=tuple(TURNS))
    for same, reference in (({"messages": answered}, "4"), ({"prompt": TURNS, "answer": 4}, "")):
        assert without_columns(load(tmp_path, json.dumps(same))) == [replace(expected, completion=reference)]
    assert load(tmp_path, json.dumps({"prompt": answered, "answer": 5}))[0].answer == "5"
    record = {"messages": TURNS, "prompt": "the prompt has priority", "answer": "a"}
    assert load(tmp_path, json.dumps(record))[0].messages == ()


def test_a_system_message_of_the_problem_replaces_that_of_the_profile(tmp_path: Path) -> None:
    """A conversation has one system message at most."""
    with_system, without = load(
        tmp_path, "\n".join(json.dumps({"prompt": turns, "answer": ""}) for turns in (TURNS, TURNS[1:2]))
    )
    assert conversation(with_system, "Other.") == TURNS
    assert conversation(without, "Other.") == [{"role": "system", "content": "Other."}, TURNS[1]]
    assert conversation(without, "") == TURNS[1:2]


def test_all_columns_are_passed_on_as_json_values(tmp_path: Path) -> None:
    """Rewards read them in `problem.extra`, under their names in the file. The tools may be JSON text."""
    tool = {"type": "function", "function": {"name": "add"}}
    record = {"prompt": "q", "answer": "a", "tools": json.dumps([tool]), "level": 3, "tests": ["x", {"y": 1.5}]}
    (found,) = load(tmp_path, json.dumps(record))
    assert (found.tools, found.extra) == ((tool,), record)
    columns = ProblemColumns(prompt="question", answer="solution", type="kind", answer_pattern=r"#### (\d+)")
    named = {"question": "q", "solution": "1 + 2\n#### 3", "kind": "math"}
    (found,) = load(tmp_path, json.dumps(named), columns)
    assert found.extra == named | {"solution": "3"}


def test_the_answer_is_the_last_match_of_a_pattern(tmp_path: Path) -> None:
    """As in GSM8K, whose answers end in `#### 72`. An answer without a match is refused with its line."""
    columns = ProblemColumns(answer_pattern=r"####\s*(.+)")
    line = json.dumps({"prompt": "q", "answer": "3 #### 4 and 6 * 12\n#### 72"})
    assert load(tmp_path, line, columns)[0].answer == "72"
    assert load(tmp_path, line, ProblemColumns(answer_pattern=r"[0-9]+"))[0].answer == "72"
    assert "data.jsonl:2: answer does not contain" in refusal(tmp_path, f"{line}\n{GOOD}", columns)
    assert "data.answer_pattern" in refusal(tmp_path, line, ProblemColumns(answer_pattern="("))


@pytest.mark.parametrize(
    ("record", "completion"),
    [
        ({"completion": "It is 2."}, "It is 2."),
        ({"completion": [{"role": "assistant", "content": "It is 2."}]}, "It is 2."),
        ({"completion": [{"role": "user", "content": "a"}]}, ""),
        ({"completion": 0.5}, ""),
        ({"prompt": [*TURNS, {"role": "assistant", "content": "4"}]}, "4"),
        ({"prompt": [*TURNS, {"role": "assistant", "content": "4"}], "completion": "Four."}, "Four."),
        ({"answer": "1 + 1 = 2\n#### 2"}, "1 + 1 = 2\n#### 2"),
        ({}, ""),
    ],
    ids=str,
)
def test_a_reference_completion_is_text_that_the_policy_could_write(
    tmp_path: Path, record: dict[str, Any], completion: str
) -> None:
    """The column `completion` as in TRL, the last message of the assistant, or a worked answer; not a bare answer."""
    columns = ProblemColumns(answer_pattern=r"####\s*(.+)") if "answer" in record else ProblemColumns()
    (found,) = load(tmp_path, json.dumps({"prompt": "1+1?", "answer": "2"} | record), columns)
    assert found.completion == completion
    assert found.extra.get("completion") == record.get("completion")
    assert problems_fingerprint([found]) == problems_fingerprint([replace(found, completion="")])


def test_problems_may_have_no_answer(tmp_path: Path) -> None:
    """For rewards that judge the completion alone: the name of the column is empty."""
    found = load(tmp_path, '{"prompt": "q"}', ProblemColumns(answer=""))
    assert without_columns(found) == [Problem(prompt="q", answer="", type="problem")]


def test_the_fingerprint_depends_on_the_problems_alone(tmp_path: Path) -> None:
    """The same problems in another form resume a run; any other text, order or division into parts does not."""
    lines, listed = load(tmp_path, f"{GOOD}\n{GOOD}"), load(tmp_path, f"[{GOOD}, {GOOD}]")
    other = load(tmp_path, GOOD.replace("1+1", "1+2"))
    found = {
        problems_fingerprint(lines),
        problems_fingerprint(lines, []),
        problems_fingerprint(lines[:1], lines[1:]),
        problems_fingerprint([*lines, *other]),
        problems_fingerprint([*other, *lines]),
    }
    assert len(found) == 5
    assert problems_fingerprint(listed) in found


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
        ('{"prompt": "q"}', "no key 'answer', only 'prompt'; set data.answer_key, or \"\" if the problems have none"),
        ("{}", "no key 'prompt', only none"),
        ('{"prompt": " ", "answer": "a"}', "prompt is empty"),
        ('{"prompt": [{"role": "user"}], "answer": "a"}', "prompt[0].content must be text, not null"),
        ('{"prompt": ["q"], "answer": "a"}', "prompt[0] must be a JSON object, not text"),
        ('{"prompt": [{"content": "q"}], "answer": "a"}', "prompt[0].role must be text that is not empty, not null"),
        ('{"prompt": [], "answer": "a"}', "prompt is empty"),
        ('{"messages": [{"role": "system", "content": "q"}], "answer": "a"}', "messages has no message of the role"),
        ('{"prompt": "q", "answer": "a", "tools": "{"}', "tools is not valid JSON"),
        ('{"prompt": "q", "answer": "a", "tools": [1]}', "tools must be a list of at most"),
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


@pytest.mark.parametrize(
    ("lines", "first", "invalid", "records"),
    [
        (f"{GOOD}\n{{}}\n{GOOD}", 2, 1, 3),
        (f"{{}}\n{GOOD}\n{{}}\n{GOOD}\n{GOOD}", 1, 2, 5),
        (f"{GOOD}\n{{}}\n{{", 2, 2, 3),
    ],
    ids=["one", "two", "not JSON"],
)
def test_malformed_records_are_counted(tmp_path: Path, lines: str, first: int, invalid: int, records: int) -> None:
    """The message has the place of the first one, and the count if there are several."""
    with pytest.raises(RecordsError) as caught:
        load(tmp_path, lines)
    error = caught.value
    assert f"data.jsonl:{first}: " in error.first
    assert (error.invalid, error.records) == (invalid, records)
    assert (f"{invalid} of {records}" in str(error)) == (invalid > 1)


def test_files_without_problems_are_refused(tmp_path: Path) -> None:
    """Missing, a directory, empty, blank, an invalid list, invalid UTF-8, deep nesting."""
    with pytest.raises(DatasetError, match=r"nowhere\.jsonl does not exist"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(DatasetError, match="is a directory"):
        read(tmp_path)
    for empty in ("", "\n \n", "[]", "\ufeff"):
        assert "is empty" in refusal(tmp_path, empty)
    assert "starts like a JSON list" in refusal(tmp_path, f"[{GOOD}")
    assert "data.jsonl:1: not valid JSON" in refusal(tmp_path, b'{"prompt": "\xff"}')
    assert "data.jsonl" in refusal(tmp_path, '{"a":' * 100_000)


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
        read(path)
    assert "data.jsonl" in str(caught.value)


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000, "~nobody-has-this-name/x"], ids=["nul", "long", "home"])
def test_paths_that_name_no_file_are_refused(path: str) -> None:
    """The operating system rejects them with various exceptions."""
    with pytest.raises(DatasetError):
        read(path)


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the file, bytes of a line, and keys of a record; the line is named."""
    sparse = tmp_path / "sparse.jsonl"
    sparse.touch()
    os.truncate(sparse, records.MAX_BYTES + 1)
    with pytest.raises(DatasetError):
        read(sparse)
    many = json.dumps({str(key): 0 for key in range(100_000)})
    message = refusal(tmp_path, f"{GOOD}\n{many}\n")
    assert message.startswith("data.jsonl:2: ")
    assert len(message) < 300
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1000)
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
        assert read(path)
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
