"""Self-distillation: the policy with a hint is the teacher of its failed completions.

SDPO (arXiv:2601.20802) lets the policy that has seen feedback or a correct completion score a completion, token by
token. SRPO (arXiv:2604.02288) routes completions: those that are correct learn from rewards, those that failed from
this teacher, whose confidence weights their tokens. A failed completion without a hint, such as one of a group without
any correct completion, learns from its reward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attachments.distillation.teacher import TeacherError, TeacherScores, Tokens
from clotho.data.problems import conversation
from clotho.models.tokenizer import ChatTokenizer
from clotho.sampler import Sampler
from protocols.errors import GenerationError, RequestError
from protocols.rollout import ScoredGroup
from protocols.sampling import Completion

PLACEHOLDER = re.compile(r"\{(solution|feedback|answer)\}")


class OwnTeacher:
    """Scores completions with the weights that are served, in the thread of scoring."""

    retries = 0

    def __init__(self, sampler: Sampler, *, top: int) -> None:
        """top: number of the best tokens of each position; 0: none."""
        self._sampler, self._top = sampler, top

    async def score(self, prompt: Tokens, completions: Sequence[Tokens]) -> list[TeacherScores]:
        """Score the completions of a prompt. Raises TeacherError."""
        found, start = [], len(prompt) - 1
        for tokens in completions:
            try:
                scored = await self._sampler.prompt_logprobs((*prompt, *tokens), top=self._top)
            except GenerationError as error:
                raise TeacherError(str(error)) from error
            best = scored.top_logprobs[start:] if self._top else ()
            found.append(TeacherScores(logprobs=scored.logprobs[start:], best=best, entropies=scored.entropies[start:]))
        return found


class HintedPrompts:
    """The prompts of failed completions with their hint. Completions that are correct have none."""

    def __init__(self, hint: str, tokenizer: ChatTokenizer, *, system: str, context_length: int) -> None:
        """system: system message of prompts. context_length: of the policy; longer sequences have no teacher."""
        self._hint, self._tokenizer, self._system, self._context = hint, tokenizer, system, context_length

    def __call__(self, scored: ScoredGroup) -> list[Tokens | None]:
        """Return the prompt with which the policy reads each completion as its teacher; None: it does not."""
        completions = scored.group.completions
        solution = next((one.text for one, yes in zip(completions, scored.correct, strict=False) if yes), "")
        correct = scored.correct or (None,) * len(completions)
        return [
            self._prompt(scored, one, solution) if yes is False and one.tokens else None
            for one, yes in zip(completions, correct, strict=True)
        ]

    def _prompt(self, scored: ScoredGroup, completion: Completion, solution: str) -> Tokens | None:
        problem = scored.prompt.problem
        values = {"solution": solution, "feedback": feedback(completion), "answer": problem.answer}
        if not all(values[name] for name in PLACEHOLDER.findall(self._hint)):
            return None
        hint = PLACEHOLDER.sub(lambda match: values[match[1]], self._hint)
        *before, last = conversation(problem, self._system)
        message: Mapping[str, Any] = {**last, "content": f"{last.get('content') or ''}\n\n{hint}"}
        try:
            tokens = self._tokenizer.render_chat([*before, message], tools=problem.tools)
        except RequestError:
            return None
        return tokens if len(tokens) + len(completion.tokens) <= self._context else None


def feedback(completion: Completion) -> str:
    """Return the last text of an episode that the policy has not sampled; empty if it has sampled all."""
    found, start = "", 0
    for turn in completion.turns:
        end = start + turn.characters
        found, start = (found if turn.sampled else completion.text[start:end]), end
    return found
