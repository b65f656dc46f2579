"""A policy whose messages are given, for tests of episodes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from clotho.lanes.sampling_client import Refusal
from protocols.prompt import Problem, Prompt
from protocols.sampling import Completion, SampleRequest
from tests.small_models import byte_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
END = 256
Answers = Callable[[str, int], str]
"""The text that the policy writes behind a prompt, for a seed."""


class ScriptedSampler:
    """Samples given texts. requests: all requests, by call."""

    def __init__(self, answers: Answers, *, ends: bool = True) -> None:
        self._answers, self._ends = answers, ends
        self.requests: list[list[SampleRequest]] = []

    async def groups(
        self, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[tuple[int, list[Completion] | Refusal], None]:
        """Yield the completions of each request."""
        self.requests.append(list(requests))
        for index, request in enumerate(requests):
            prompt = byte_tokenizer().decode(request.prompt, skip_special_tokens=False)
            yield index, [self._completion(request, self._answers(prompt, seed)) for seed in request.seeds]

    def _completion(self, request: SampleRequest, text: str) -> Completion:
        tokens = (*byte_tokenizer().encode(text), *([END] if self._ends else []))[: request.sampling.max_tokens]
        complete = tokens[-1] == END
        return Completion(
            tokens=tokens,
            logprobs=(-1.0,) * len(tokens),
            versions=(len(self.requests),) * len(tokens),
            text=text,
            finish_reason="stop" if complete else "length",
        )


def call(name: str, **arguments: Any) -> str:
    """Return a call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompts(*columns: dict[str, Any]) -> list[Prompt]:
    """Return one prompt for each problem with these columns."""
    return [
        Prompt(group_id=n, problem=Problem(prompt="go", answer="", type="t", extra=extra), tokens=(1,), seed=n)
        for n, extra in enumerate(columns)
    ]


def script(*texts: str) -> Answers:
    """Return a policy that writes these texts, one for each of its turns; then the last one."""
    return lambda prompt, _: texts[min(prompt.count("assistant: ") - 1, len(texts) - 1)]
