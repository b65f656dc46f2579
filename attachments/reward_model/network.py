"""A reward model in a run: it scores conversations in the thread of scoring, in turns of its own."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attachments.reward_model import NAME
from attachments.reward_model.classifier import open_classifier
from attachments.reward_model.settings import NetworkSettings, settings_of
from clotho.backend import backend
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.model_files import read_config
from clotho.models.tokenizer import ChatTokenizer
from clotho.models.turns import UNSHARED, TurnBudget, Turns
from clotho.rewards.registry import RewardOptions
from clotho.rewards.values import Completions, RewardError, Values
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import MicroBatch, scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.model import ModelSection
from protocols.errors import ModelError, RequestError
from protocols.prompt import Problem

Tokens = tuple[int, ...]


class Network:
    """Computes values. It belongs to one thread."""

    def __init__(self, settings: NetworkSettings, lane: Turns = UNSHARED) -> None:
        """Load the classifier and its tokenizer. Raises ModelError. lane: between turns, others compute."""
        section = ModelSection(path=settings.model, dtype=settings.dtype, chat_template=settings.chat_template)
        self._model, files = open_classifier(section)
        self._model.freeze()
        self._model.eval()
        backend().install_layers(self._model)
        mx.eval(self._model.parameters())
        self.tokenizer = ChatTokenizer.of_model(files, section)
        self._context = int(read_config(files).get("max_position_embeddings") or 2**31)
        self._score_D = self._model.score.weight[0].astype(mx.float32)
        if not mx.isfinite(mx.sum(self._score_D)).item():
            raise ModelError(f"reward model {settings.model}: the weights of its head are not finite")
        self._vocabulary = int(self._model.model.embed_tokens.weight.shape[0])
        self._forcing = TeacherForcing(self._model, self._vocabulary, layout="padded")
        self._budget, self._turns = settings.micro_batch_tokens, TurnBudget(settings.max_turn_ms / 1000.0, lane)

    def conversation(self, problem: Problem, text: str) -> Tokens:
        """Return a problem with a completion in the chat template of the model; as plain text without a template.

        Raises RewardError if the template refuses the messages, or the tokens do not fit the model.
        """
        messages = problem.messages or ({"role": "user", "content": problem.prompt},)
        try:
            if not self.tokenizer.has_chat_template:
                tokens = self.tokenizer.encode(f"{problem.prompt}{text}")
            else:
                whole = [*messages, {"role": "assistant", "content": text}]
                tokens = self.tokenizer.render_chat(whole, add_generation_prompt=False, tools=problem.tools)
        except RequestError as error:
            raise RewardError(f"the chat template of the reward model refuses a conversation: {error}") from error
        if len(tokens) > self._context:
            raise RewardError(f"a conversation has {len(tokens)} tokens, and the context is {self._context}")
        return tuple(tokens)

    def values(self, texts: Sequence[Tokens]) -> list[float]:
        """Return the value at the last token of each text. Raises RewardError if one is not finite."""
        sequences = [scored_only(tokens, (0,)) for tokens in texts]  # what would predict a token behind the last one
        found: dict[int, float] = {}
        for micro in build_micro_batches(sequences, layout="padded", budget=self._budget):
            self._turns.begin()
            found |= zip(micro.members, self._value_N(micro).tolist(), strict=False)  # padding is at the end
            self._turns.pause()
        if not np.isfinite(list(found.values())).all():
            raise RewardError("a value is not finite")
        return [found[member] for member in range(len(texts))]

    def _value_N(self, micro: MicroBatch) -> NDArray[np.float32]:
        with self._turns.recorded(self._model, gradients=False) as stages:
            value_N = self._forcing.hidden(micro).astype(mx.float32) @ self._score_D
        self._turns.evaluate(stages.take(), value_N)
        return np.array(value_N)


class NetworkReward:
    """The reward function `reward_model`."""

    def __init__(self, settings: NetworkSettings) -> None:
        self._settings = settings
        self._network: Network | None = None

    async def begin(self, compute: Compute) -> None:
        """Load the model in the thread of scoring. Raises ModelError."""
        self._compute = compute
        self._network = await finish(compute.scoring.submit(lambda: Network(self._settings, compute.scoring.lane)))

    async def score(self, completions: Completions) -> Values:
        """Return the value of each completion. Raises RewardError."""
        network = self._network
        if network is None:
            raise RewardError(f"{NAME} has no compute threads here")
        texts = [network.conversation(completions.problem, text) for text in completions.texts]
        return tuple(await finish(self._compute.scoring.submit(lambda: network.values(texts))))


def load(options: RewardOptions) -> NetworkReward:
    """Return the reward, whose model is read when the run begins. Raises ProfileError."""
    return NetworkReward(settings_of(options.settings))
