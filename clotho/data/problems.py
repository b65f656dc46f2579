"""Records to problems: columns, conversations, and the answer inside a longer text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct, structs

from clotho.data.records import Source, read_records
from protocols.errors import DatasetError, RecordsError, nearest, visible
from protocols.prompt import Problem

MAX_KEYS = 1_000
"""Number of keys of a record."""

MAX_MESSAGES = 1_000
"""Number of messages of a conversation, and of its tools."""

MAX_SHOWN_KEYS = 8
MAX_SHOWN_KEY = 40
"""Keys, and characters of a key, that an error message shows."""

MAX_ANSWER_SEARCH = 100_000
"""Characters at the end of an answer in which `answer_pattern` is searched."""

TOOLS = "tools"
"""Column with the tools of a conversation: a list of definitions, or its JSON text."""

COMPLETION = "completion"
"""Column with a reference completion, as in TRL: text, or a list of one message of the assistant."""

CHOSEN = "chosen"
"""Column with the better completion of a pair, as in TRL: like the one above, or a conversation that ends with it."""

LABEL = "label"
"""Column with whether a completion is desirable, as in TRL."""

ASSISTANT, LAST_ROLES = "assistant", ("user", "tool")


class ProblemColumns(Struct, frozen=True, kw_only=True, dict=True):
    """Keys of the records of a dataset.

    prompt: text or a list of chat messages. messages: a list of chat messages, read from records without the prompt.
    answer: an empty name means that the problems have no answer. default_type: type of records without a type.
    answer_pattern: regular expression; the answer is the first group (or all) of its last match. Empty: the column.
    """

    prompt: str = "prompt"
    messages: str = "messages"
    answer: str = "answer"
    type: str = "type"
    default_type: str = "problem"
    answer_pattern: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """The compiled `answer_pattern`. Raises DatasetError."""
        try:
            return re.compile(self.answer_pattern) if self.answer_pattern else None
        except (re.error, RecursionError, OverflowError) as error:
            raise DatasetError(f"data.answer_pattern is not a regular expression: {error}") from error


def load_problems(source: Source, *, columns: ProblemColumns) -> list[Problem]:
    """Read all problems of a dataset, in its order.

    Blank lines and a byte order mark are ignored. Answers that are numbers or booleans become their JSON text. Raises
    RecordsError with the place of the first invalid record (`FILE:LINE`) and the number of invalid records, and
    DatasetError if the dataset cannot be read or is empty.
    """
    _ = columns.pattern  # raises for an expression that is not valid
    problems: list[Problem] = []
    first, invalid = "", 0
    try:
        for where, record in read_records(source):
            try:
                problems.append(_problem(record, columns, where))
            except DatasetError as error:
                first, invalid = first or str(error), invalid + 1
    except DatasetError:  # the rest of the file cannot be read
        if not invalid:
            raise
    if invalid:
        raise RecordsError(first, invalid=invalid, records=invalid + len(problems))
    if not problems:
        raise DatasetError(f"dataset {visible(source.path, 200)} is empty")
    return problems


def problems(
    path: str,
    *,
    split: str = "train",
    subset: str = "",
    system: str = "",
    prompt_key: str = "prompt",
    messages_key: str = "messages",
    answer_key: str = "answer",
    answer_pattern: str = "",
    type_key: str = "type",
) -> list[Problem]:
    """Read problems.

    path: a file (JSON lines, JSON, CSV, Parquet), a directory of splits, or a dataset of the Hugging Face hub, which
    needs the package `datasets`. split, subset: of a directory or the hub; a file has none. system: a system message
    before every prompt that has none. prompt_key, messages_key, answer_key, type_key: names of columns, as in `[data]`;
    prompts are text or chat messages; answer_key = "": the problems have none. answer_pattern: regular expression that
    finds the answer in its column. All columns of a record are in `problem.extra`.
    Raises DatasetError with the place of the first record that is not valid.
    """
    columns = ProblemColumns(
        prompt=prompt_key, messages=messages_key, answer=answer_key, type=type_key, answer_pattern=answer_pattern
    )
    found = load_problems(Source(path=path, subset=subset, split=split), columns=columns)
    if not system:
        return found
    return [structs.replace(one, messages=tuple(dict(m) for m in conversation(one, system))) for one in found]


def conversation(problem: Problem, system: str) -> list[Mapping[str, Any]]:
    """Return the messages before the completion. A system message of the problem replaces `system`."""
    messages: tuple[Mapping[str, Any], ...] = problem.messages or ({"role": "user", "content": problem.prompt},)
    if system and messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    return list(messages)


def _problem(record: Any, columns: ProblemColumns, where: str) -> Problem:
    if isinstance(record, DatasetError):
        raise record
    if not isinstance(record, dict):
        raise DatasetError(f"{where}: must be a JSON object, not {_kind(record)}")
    if len(record) > MAX_KEYS:
        raise DatasetError(f"{where}: has {len(record)} keys; at most {MAX_KEYS} are permitted")
    column = columns.prompt if columns.prompt in record or columns.messages not in record else columns.messages
    if column not in record and isinstance(record.get(CHOSEN), list):
        column = CHOSEN
    prompt = _required(record, column, "prompt", where)
    messages, completion = ((), None) if isinstance(prompt, str) else _conversation(prompt, column, where)
    text = prompt if isinstance(prompt, str) else str(messages[-1]["content"])
    if not text.strip():
        raise DatasetError(f"{where}: {column} is empty")
    problem_type = record.get(columns.type, columns.default_type)
    if not isinstance(problem_type, str) or not problem_type:
        raise DatasetError(f"{where}: {columns.type} must be text that is not empty, not {_kind(problem_type)}")
    answer = _answer(record, columns, completion, where)
    values = dict(record) | ({columns.answer: answer} if columns.pattern and columns.answer in record else {})
    return Problem(
        prompt=text,
        answer=answer,
        type=problem_type,
        messages=messages,
        tools=_tools(record.get(TOOLS), where),
        extra=_extra(values, where),
        completion=_reference(record, columns, completion),
    )


def _conversation(value: Any, column: str, where: str) -> tuple[tuple[dict[str, Any], ...], str | None]:
    """Check chat messages. Returns the messages up to the last turn of the user, and the answer after them, if any."""
    if value == []:
        raise DatasetError(f"{where}: {column} is empty")
    if not isinstance(value, list):
        raise DatasetError(f"{where}: {column} must be text or a list of chat messages, not {_kind(value)}")
    if len(value) > MAX_MESSAGES:
        raise DatasetError(f"{where}: {column} has {len(value)} messages; at most {MAX_MESSAGES} are permitted")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(value):
        place = f"{where}: {column}[{number}]"
        if not isinstance(message, dict):
            raise DatasetError(f"{place} must be a JSON object, not {_kind(message)}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise DatasetError(f"{place}.role must be text that is not empty, not {_kind(role)}")
        if not isinstance(content, str) and not (content is None and role == ASSISTANT):
            raise DatasetError(f"{place}.content must be text, not {_kind(content)}")
        messages.append({key: part for key, part in message.items() if part is not None})
    completion = None
    while messages and messages[-1]["role"] == ASSISTANT:
        completion = messages.pop().get("content")
    if not messages or messages[-1]["role"] not in LAST_ROLES:
        raise DatasetError(f"{where}: {column} has no message of the role user before the completion")
    return tuple(_extra({"messages": messages}, where)["messages"]), completion


def _answer(record: dict[str, Any], columns: ProblemColumns, completion: str | None, where: str) -> str:
    """Return the answer of a record. The last message of the assistant is the answer if there is no such column."""
    if not columns.answer:
        return ""
    if columns.answer not in record and completion is not None:
        answer = completion
    else:
        answer = _text(_required(record, columns.answer, "answer", where), columns.answer, where)
    if columns.pattern is None:
        return answer
    matches = deque(columns.pattern.finditer(answer[-MAX_ANSWER_SEARCH:]), maxlen=1)
    if not matches:
        raise DatasetError(f"{where}: {columns.answer} does not contain data.answer_pattern: {visible(answer, 60)!r}")
    return matches[0][1 if columns.pattern.groups else 0] or ""


def _reference(record: dict[str, Any], columns: ProblemColumns, last_message: str | None) -> str:
    """Return the reference completion: the column, else the last message of the assistant, else a worked answer.

    A column with something else than text or one message of the assistant is not a reference completion; of the better
    completion of a pair, the last message is. A completion that is labelled as undesirable is none.
    """
    if record.get(LABEL) is False:
        return ""
    match record.get(COMPLETION):
        case str(text) | [{"role": "assistant", "content": str(text)}]:
            return text
    match record.get(CHOSEN):
        case str(text) | [*_, {"role": "assistant", "content": str(text)}]:
            return text
    if last_message is not None:
        return last_message
    worked = record.get(columns.answer) if columns.pattern is not None else None
    return worked if isinstance(worked, str) else ""


def _tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{where}: {TOOLS} is not valid JSON: {error}") from error
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_MESSAGES or not all(isinstance(tool, dict) for tool in value):
        raise DatasetError(f"{where}: {TOOLS} must be a list of at most {MAX_MESSAGES} objects")
    return tuple(_extra({TOOLS: value}, where)[TOOLS])


def _extra(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return columns as JSON values: dates become text. Raises DatasetError for other values, such as images."""
    for key, value in values.items():
        if isinstance(value, str | bool | None):
            continue
        try:
            values[key] = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            name = visible(str(key), MAX_SHOWN_KEY)
            raise DatasetError(f"{where}: column {name!r} is not a JSON value ({type(value).__name__})") from error
    return values


def _required(record: dict[str, Any], key: str, column: str, where: str) -> Any:
    if key in record:
        return record[key]
    close = nearest(key, [name for name in record if len(name) <= MAX_SHOWN_KEY])
    hint = f"; did you mean data.{column}_key = {close!r}?" if close else f"; set data.{column}_key"
    if column == "answer" and not close:
        hint += ', or "" if the problems have none'
    names = [repr(visible(name, MAX_SHOWN_KEY)) for name in islice(record, MAX_SHOWN_KEYS)]
    if len(record) > MAX_SHOWN_KEYS:
        names.append(f"and {len(record) - MAX_SHOWN_KEYS} more")
    raise DatasetError(f"{where}: no key {visible(key, MAX_SHOWN_KEY)!r}, only {', '.join(names) or 'none'}{hint}")


def _text(answer: Any, key: str, where: str) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, bool | float):
        return msgspec.json.encode(answer).decode()
    raise DatasetError(f"{where}: {key} must be text or a number, not {_kind(answer)}")


def _kind(value: Any) -> str:
    names: Iterable[tuple[type, str]] = (
        (dict, "an object"), (list, "a list"), (str, "text"), (type(None), "null"), (bool, "a boolean"),
    )  # fmt: skip
    return next((name for kind, name in names if type(value) is kind), "a number")
