"""Collects one group of every environment from a fake server. Runs in an interpreter that has atroposlib.

PYTHON collect_groups.py DIRECTORY_OF_SCRIPTS MODEL: prints one JSON object with the requests and the groups.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from typing import Any

SCRIPTS, MODEL = sys.argv[1:3]
sys.path.insert(0, SCRIPTS)
END = 2

ArithmeticEnv: Any = import_module("arithmetic").ArithmeticEnv
GuessingEnv: Any = import_module("guessing_game").GuessingEnv
QuestionAnswerEnv: Any = import_module("question_answer").QuestionAnswerEnv
Question: Any = import_module("rollouts").Question
Story: Any = import_module("guessing").Story


class FakeServer:
    """Fake inference server: each request receives the next texts as tokens with an end token."""

    def __init__(self, environment: Any, texts: list[str]) -> None:
        self.requests: list[dict[str, Any]] = []
        self._tokenizer = environment.tokenizer
        self._texts = iter(texts)
        for server in environment.server.servers:
            server.tokens_and_logprobs_completion = self.answer

    async def answer(self, **request: Any) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Return a result in the format of atroposlib's client."""
        settings = {key: request[key] for key in sorted(request) if key not in ("model", "prompt")}
        self.requests.append(settings)
        rows = [
            [*self._tokenizer.encode(next(self._texts), add_special_tokens=False), END] for _ in range(request["n"])
        ]
        return request["input_ids"], rows, [[-0.5] * len(row) for row in rows], ["stop"] * len(rows)


def make(kind: Any, **settings: Any) -> Any:
    """Create an environment as its command line does."""
    config, servers = kind.config_init()
    config = config.model_copy(update={"tokenizer_name": MODEL, "group_size": 2, **settings})
    servers[0].tokenizer_name = MODEL
    return kind(config, servers)


async def group(kind: Any, item: Any, texts: list[str], **settings: Any) -> dict[str, Any]:
    """Collect one group."""
    environment = make(kind, **settings)
    server = FakeServer(environment, texts)
    try:
        made, backlog = await environment.collect_trajectories(item)
    except BaseException as error:
        return {"error": type(error).__name__, "requests": server.requests}
    texts = [environment.tokenizer.decode(tokens) for tokens in made["tokens"]]
    return {**made, "requests": server.requests, "texts": texts, "backlog": backlog}


async def main() -> dict[str, Any]:
    """Collect the groups of all cases."""
    story = Story(name="Ann", things="coins", secret=5, largest=7)
    right, wrong, none = "<think>1</think><answer>5</answer>", "<think></think><answer>3</answer>", "so"
    return {
        "arithmetic": await group(ArithmeticEnv, Question(text="What is 2 + 3?", answer="5"), [right, wrong]),
        "lost": await group(ArithmeticEnv, Question(text="What is 2 + 3?", answer="5"), [right]),
        "game": await group(GuessingEnv, story, [wrong, none, wrong, wrong, right], group_size=1)
        | {"second": await group(GuessingEnv, story, [wrong, right], group_size=1)},
        "lost game": await group(GuessingEnv, story, [wrong, none], group_size=2),
        "question": await group(
            QuestionAnswerEnv,
            Question(text="2+3?", answer="Two and three.\n#### 5"),
            [right, "It is 5"],
            form_score=0.5,
        ),
        "untagged": await group(
            QuestionAnswerEnv, Question(text="2+3?", answer="5"), ["It is 5", "4"], tags_needed=False
        ),
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main())) + "\n")
