"""What the environments share: problems from a file, settings of sampling, groups as a trainer expects them.

Nothing but the standard library; a node is what atroposlib's managed server remembers of one sequence.
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
"""The policy and the problems that ship with Clotho."""

SETTINGS = {"tokenizer_name": str(EMBEDDED), "group_size": 8, "use_wandb": False, "steps_per_eval": 0}
"""Settings of every environment here that differ from those of Atropos."""

SERVER = {
    "server_type": "vllm",
    "base_url": "http://127.0.0.1:8000/v1",
    "api_key": "none",
    "model_name": "policy",
    "tokenizer_name": str(EMBEDDED),
}
"""Where Clotho serves its policy unless told otherwise. `vllm` names the routes, not the program behind them."""

SAMPLING_VARIABLE = "CLOTHO_SAMPLING"
"""Environment variable in which a run of Clotho says how its policy is to be sampled, as a JSON object."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One line of a file of problems."""

    text: str
    answer: str


class Node(Protocol):
    """One sequence of a managed server: labels are -100 and log-probabilities 1.0 at tokens that were not sampled."""

    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    full_text: str


def sampling(longest: int) -> dict[str, Any]:
    """Return the sampling settings of a request: the run's, where it states them; else temperature 1.

    longest: tokens of a completion at most, where the run states no other number.
    """
    stated = json.loads(os.environ.get(SAMPLING_VARIABLE) or "{}")
    given = {key: value for key, value in stated.items() if value is not None}
    return {"temperature": 1.0, "max_tokens": longest} | given


def read_questions(path: str, *, question_key: str, answer_key: str) -> list[Question]:
    """Read the problems of a file of JSON lines; raises ValueError that names the line where a column is missing."""
    if not path:
        raise ValueError("no file of questions is given; --env.data_path names one")
    questions: list[Question] = []
    with Path(path).expanduser().open(encoding="utf-8") as lines:
        for count, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict) or question_key not in row or answer_key not in row:
                raise ValueError(f"{path}, line {count}: no {question_key!r} or no {answer_key!r}")
            questions.append(Question(text=str(row[question_key]), answer=str(row[answer_key])))
    if not questions:
        raise ValueError(f"{path} holds no problems")
    return questions


def endless(questions: Sequence[Question], rng: random.Random) -> Iterator[Question]:
    """Yield the problems for ever, each once an epoch, in a new order every epoch."""
    while True:
        yield from rng.sample(questions, len(questions))


def conversation(question: str, system: str) -> list[dict[str, str]]:
    """Return the messages that ask a question, with a system message before it unless that is empty."""
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": question}]


def scored_group(nodes: Sequence[Node], scores: Sequence[float]) -> dict[str, Any]:
    """Return the group that goes to the trainer: one sequence per node, with the score of the same place."""
    return {
        "tokens": [node.tokens for node in nodes],
        "masks": [node.masked_tokens for node in nodes],
        "inference_logprobs": [node.logprobs for node in nodes],
        "scores": list(scores),
    }


def close_turn(node: Node, end_token_id: int | None, end_token: str | None) -> None:
    """Let a node's text end as its tokens do, once a turn was generated.

    Tokens include the end token and the text does not; the next turn, rendered from text, would repeat it.
    """
    if end_token and node.tokens[-1] == end_token_id and not node.full_text.endswith(end_token):
        node.full_text += end_token


def quieten() -> None:
    """Keep atroposlib, which reports every look at the queue, to warnings.

    By a filter and not by a level, for others may read along: what starts an environment may look for its registration.
    """
    logging.getLogger("atroposlib.envs.base").addFilter(lambda record: record.levelno >= logging.WARNING)
