"""Functions that all environments use: problems from a file, sampling parameters, and the format of a group.

Uses only the standard library. A node is the record of one sequence in atroposlib's managed server.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

EMBEDDED = Path(__file__).resolve().parents[1] / "embedded"
"""Directory of the policy and the problems that are part of Clotho."""

SETTINGS = {"tokenizer_name": str(EMBEDDED), "group_size": 8, "use_wandb": False, "steps_per_eval": 0}
"""Settings of all environments that differ from the defaults of Atropos."""

SERVER = {
    "server_type": "vllm",
    "base_url": "http://127.0.0.1:8000/v1",
    "api_key": "none",
    "model_name": "policy",
    "tokenizer_name": str(EMBEDDED),
}
"""Default address of Clotho's HTTP server. `vllm` is the format of the requests."""

SAMPLING_VARIABLE = "CLOTHO_SAMPLING"
"""Environment variable that contains the run's sampling parameters as a JSON object."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One problem."""

    text: str
    answer: str


class Node(Protocol):
    """One sequence of a managed server. Tokens that were not sampled have label -100 and log-probability 1.0."""

    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    full_text: str


def sampling(max_tokens: int) -> dict[str, Any]:
    """Return the sampling parameters of a request: those of the run, otherwise temperature 1 and `max_tokens`."""
    of_run = json.loads(os.environ.get(SAMPLING_VARIABLE) or "{}")
    given = {key: value for key, value in of_run.items() if value is not None}
    return {"temperature": 1.0, "max_tokens": max_tokens} | given


def read_questions(path: str, *, question_key: str, answer_key: str) -> list[Question]:
    """Read the problems of a JSON Lines file. Raises ValueError with the number of a line without the columns."""
    if not path:
        raise ValueError("no file of questions: set --env.data_path")
    questions: list[Question] = []
    with Path(path).expanduser().open(encoding="utf-8") as lines:
        for count, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict) or question_key not in row or answer_key not in row:
                raise ValueError(f"{path}, line {count}: the column {question_key!r} or {answer_key!r} is missing")
            questions.append(Question(text=str(row[question_key]), answer=str(row[answer_key])))
    if not questions:
        raise ValueError(f"{path} contains no problems")
    return questions


def endless(questions: Sequence[Question], rng: random.Random) -> Iterator[Question]:
    """Yield the problems forever, in a new random order in every epoch."""
    while True:
        yield from rng.sample(questions, len(questions))


def conversation(question: str, system: str) -> list[dict[str, str]]:
    """Return the messages of a question, with the system message first unless it is empty."""
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": question}]


def scored_group(nodes: Sequence[Node], scores: Sequence[float]) -> dict[str, Any]:
    """Return the group for the trainer: one sequence and one score per node."""
    return {
        "tokens": [node.tokens for node in nodes],
        "masks": [node.masked_tokens for node in nodes],
        "inference_logprobs": [node.logprobs for node in nodes],
        "scores": list(scores),
    }


def close_turn(node: Node, end_token_id: int | None, end_token: str | None) -> None:
    """Append the end token to the text of a node after a turn.

    The tokens of a node include the end token and its text does not. Without this correction the next turn, which is
    rendered from the text, would contain the end token twice.
    """
    if end_token and node.tokens[-1] == end_token_id and not node.full_text.endswith(end_token):
        node.full_text += end_token


def quieten() -> None:
    """Suppress atroposlib's log messages below warnings; it logs every poll of the queue.

    A filter is used instead of a level, because the process that starts an environment reads its registration from the
    same logger.
    """
    logging.getLogger("atroposlib.envs.base").addFilter(lambda record: record.levelno >= logging.WARNING)
