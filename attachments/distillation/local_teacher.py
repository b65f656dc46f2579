"""A teacher of this process: a model that scores in the thread of scoring, between decode steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attachments.distillation.teacher import Encode, TeacherError, TeacherScores, Tokens
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.loading import find_model
from clotho.models.policy import BaseModel
from clotho.models.tokenizer import ChatTokenizer
from clotho.models.turns import TurnBudget
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.prompt_logprobs import MODEL_DISTRIBUTION, PromptScorer
from clotho.scoring.sequences import scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.model import ModelSection
from clotho.training.gradient import LearnerModel
from protocols.errors import GenerationError


def encoder(path: str) -> Encode:
    """Return the encoder of a model's tokenizer. Raises ModelError."""
    section = ModelSection(path=path)
    tokenizer = ChatTokenizer.of_model(find_model(path), section)
    return lambda texts: [tokenizer.encode(text)[1:] for text in texts]


async def load_teacher(
    path: str, compute: Compute, *, top: int, micro_batch_tokens: int, turn_seconds: float
) -> LocalTeacher:
    """Load a teacher in the thread of scoring. Raises ModelError.

    top: number of the best tokens of each position; 0: none. micro_batch_tokens: positions of a forward pass.
    turn_seconds: longest turn beside decoding.
    """

    def load() -> LocalTeacher:
        turns = TurnBudget(turn_seconds, compute.scoring.lane)
        return LocalTeacher(
            BaseModel(ModelSection(path=path)), compute, top=top, micro_batch_tokens=micro_batch_tokens, turns=turns
        )

    return await finish(compute.scoring.submit(load))


class LocalTeacher:
    """Scores the completions of a group in micro-batches, which share their prompt where that pays.

    With the best tokens of each position, it scores one completion after the other, so that it never holds the logits
    of more rows than a prompt of the HTTP server.
    """

    def __init__(
        self, model: BaseModel, compute: Compute, *, top: int, micro_batch_tokens: int, turns: TurnBudget
    ) -> None:
        self._thread, self._top, self._budget, self._turns = compute.scoring, top, micro_batch_tokens, turns
        own, self._context = model.copy_model(), model.context_length
        forcing = TeacherForcing(own.model, own.vocab_size, layout="auto")
        self._model = LearnerModel(own, forcing, MODEL_DISTRIBUTION, turns)
        self._scorer = PromptScorer(own, chunk=micro_batch_tokens, turns=turns)
        self.retries = 0

    async def score(self, prompt: Tokens, completions: Sequence[Tokens]) -> list[TeacherScores]:
        """Score the completions of a prompt. Raises TeacherError."""
        longest = len(prompt) + max(map(len, completions))
        if longest > self._context:
            raise TeacherError(f"a sequence has {longest} tokens, and the context of the teacher is {self._context}")
        if max((*prompt, *(token for one in completions for token in one))) >= self._model.policy.vocab_size:
            raise TeacherError("a token is not in the vocabulary of the teacher")
        work = self._best if self._top else self._logprobs
        try:
            found = await finish(self._thread.submit(lambda: work(prompt, completions)))
        except GenerationError as error:
            raise TeacherError(str(error)) from error
        if not all(np.isfinite(one.logprobs).all() for one in found):
            raise TeacherError("the logits of the teacher are not finite")
        return found

    def _logprobs(self, prompt: Tokens, completions: Sequence[Tokens]) -> list[TeacherScores]:
        sequences = [scored_only(prompt, tokens) for tokens in completions]
        found: dict[int, TeacherScores] = {}
        for micro in build_micro_batches(sequences, layout=self._model.forcing.layout, budget=self._budget):
            self._turns.begin()
            scored, start = np.array(self._model.logprobs(micro)).tolist(), 0
            for member in micro.members:
                end = start + len(completions[member])
                found[member], start = TeacherScores(logprobs=tuple(scored[start:end])), end
            self._turns.pause()
        return [found[member] for member in range(len(completions))]

    def _best(self, prompt: Tokens, completions: Sequence[Tokens]) -> list[TeacherScores]:
        found = []
        for tokens in completions:
            scored = self._scorer.score({}, (*prompt, *tokens), version=0, top=self._top)
            start = len(prompt) - 1
            found.append(TeacherScores(logprobs=scored.logprobs[start:], best=scored.top_logprobs[start:]))
        return found
