"""Plays one group of every environment against a server that says what the test wants; run where atroposlib is.

PYTHON play.py DIRECTORY_OF_SCRIPTS MODEL: prints one JSON object: what was asked, and the groups that were made.
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


class Told:
    """Stands for the inference server: each request is answered with the next texts, as tokens, all ended."""

    def __init__(self, environment: Any, texts: list[str]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._tokenizer = environment.tokenizer
        self._texts = iter(texts)
        for server in environment.server.servers:
            server.tokens_and_logprobs_completion = self.answer

    async def answer(self, **request: Any) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Answer as atroposlib's own client would."""
        settings = {key: request[key] for key in sorted(request) if key not in ("model", "prompt")}
        self.asked.append(settings)
        rows = [
            [*self._tokenizer.encode(next(self._texts), add_special_tokens=False), END] for _ in range(request["n"])
        ]
        return request["input_ids"], rows, [[-0.5] * len(row) for row in rows], ["stop"] * len(rows)


def make(kind: Any, **settings: Any) -> Any:
    """Make an environment as its command line would."""
    config, servers = kind.config_init()
    config = config.model_copy(update={"tokenizer_name": MODEL, "group_size": 2, **settings})
    servers[0].tokenizer_name = MODEL
    return kind(config, servers)


async def group(kind: Any, item: Any, texts: list[str], **settings: Any) -> dict[str, Any]:
    """Make one group."""
    environment = make(kind, **settings)
    told = Told(environment, texts)
    try:
        made, backlog = await environment.collect_trajectories(item)
    except BaseException as error:
        return {"error": type(error).__name__, "asked": told.asked}
    texts = [environment.tokenizer.decode(tokens) for tokens in made["tokens"]]
    return {**made, "asked": told.asked, "texts": texts, "backlog": backlog}


async def main() -> dict[str, Any]:
    """Make a group of each."""
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
