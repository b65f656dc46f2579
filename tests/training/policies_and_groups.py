"""Shared by the tests of training: a bigram policy, a tiny transformer, groups and learners."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import qwen3

from clotho.models.parameters import Parameters, flat
from clotho.models.policy import Policy, TrainablePolicy
from clotho.models.turns import UNDIVIDED, UNSHARED, Turns
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.engine import SamplingSection
from clotho.settings.learner import LearnerSection
from clotho.training.batch import Division, UpdateStart, prepare
from clotho.training.gradient import LearnerModel, LossConfig, StepPosition
from clotho.training.objectives.functions import objective
from clotho.training.objectives.loss import initial_loss_coefficients
from clotho.training.reference_policy import ReferencePolicy
from clotho.training.update import PolicyLearner
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup
from protocols.sampling import Completion
from tests import model_lanes
from tests.learner_settings import learner_settings, policy_settings
from training_run.update_values import UpdateKl

VOCAB = 32


class Bigram(nn.Module):
    """A language model that sees one token back: logits = embed(token) W^T."""

    def __init__(self, *, vocab_size: int = 5, width: int = 3, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        key_embed, key_head = mx.random.split(mx.random.key(seed))
        self.model = nn.Embedding(vocab_size, width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.model.weight = mx.random.normal((vocab_size, width), key=key_embed)
        self.lm_head.weight = mx.random.normal((vocab_size, width), key=key_head)

    def __call__(self, tokens_B_S: mx.array, cache: Any = None) -> mx.array:
        return self.lm_head(self.model(tokens_B_S))


class BigramPolicy:
    """All weights of a `Bigram` trained; the shape of `Policy`, and of the `PolicyModel` that `copy_model` returns."""

    def __init__(
        self, model: nn.Module | None = None, vocab_size: int = 5, *, frozen: Parameters | None = None
    ) -> None:
        """frozen: weights of the reference policy; by default others than those of the model."""
        self.model = model or Bigram(vocab_size=vocab_size)
        self.vocab_size = vocab_size
        self.version = 0
        self.fingerprint, self.flips_routes = "initial", False
        self._used = self.model.trainable_parameters()
        self._frozen = frozen or tree_map(lambda array: array + 0.3 * mx.sin(7 * array), self._used)
        mx.eval(self._used, self._frozen)

    def trainable(self) -> Parameters:
        return cast(Parameters, tree_map(lambda array: array, self._used))

    def publish(self, parameters: Parameters, *, version: int, step: int, fingerprint: str) -> float:
        self.use(parameters)
        self.version, self.fingerprint = version, fingerprint
        return 0.0

    def copy_model(self) -> BigramPolicy:
        shared = {id(array): array for array in flat(self.model.parameters()).values()}
        return type(self)(copy.deepcopy(self.model, shared), self.vocab_size, frozen=self._frozen)

    def use(self, parameters: Parameters) -> None:
        self._used = parameters
        self.model.update(parameters)

    def use_reference(self) -> None:
        self.use(self._frozen)

    def release(self) -> None:
        self.use(tree_map(mx.zeros_like, self._used))

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()


def tiny_policy(*, tied: bool = True, **section: Any) -> Policy:
    """A Qwen3 of two layers with random weights and an adapter (rank 4, scale 2 by default) over every linear layer."""
    config = {
        "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": tied, **model_lanes.sizes(),
    }  # fmt: skip
    model_lanes.skip_full_training(section.get("kind", "lora"))
    mx.random.seed(7)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    weights = model.parameters()  # type: ignore[no-untyped-call]
    model.update(tree_map(lambda array: array * 3.0 if array.ndim == 2 else array, weights))
    model_lanes.converted(model)
    settings = policy_settings(**{"rank": 4, "scale": 2.0, **section})
    return Policy(model, cast(Any, None), settings, config=config, seed=0, keep_reference=True)


def model_with(policy: TrainablePolicy, parameters: Parameters) -> Any:
    """Return the modules of a copy of the policy's model, which compute with these parameters."""
    copied = policy.copy_model()
    copied.use(parameters)
    return copied.model


def learner(
    policy: TrainablePolicy, *, steps: int = 10, measure_update_kl: int = 0, lane: Turns = UNSHARED, **keys: Any
) -> PolicyLearner:
    """A learner with a rate of 1e-2 that stays, and all else by default."""
    settings = learner_settings(**{"learning_rate": 1e-2, "schedule": "constant", "warmup_steps": 0, **keys})
    measure = UpdateKl(measure_update_kl)
    return PolicyLearner(policy, settings, SamplingSection(), steps=steps, measure=measure, lane=lane)


def scored_group(
    completions: Sequence[Sequence[int]],
    rewards: Sequence[float],
    *,
    prompt: Sequence[int] = (1, 2),
    logprob: float = -1.5,
    version: int = 0,
    group_id: int = 0,
) -> ScoredGroup:
    """A group with these completion tokens; every token was sampled with the same log-probability and version."""
    problem = Problem(prompt="?", answer="!", type="problem")
    return ScoredGroup(
        group=RolloutGroup(
            prompt=Prompt(group_id=group_id, problem=problem, tokens=tuple(prompt), seed=0),
            completions=tuple(completion(tokens, [logprob] * len(tokens), version) for tokens in completions),
        ),
        rewards=tuple(rewards),
        parts={},
    )


def completion(tokens: Sequence[int], logprobs: Sequence[float], version: int = 0) -> Completion:
    """A completion as a sampler would have recorded it."""
    return Completion(
        tokens=tuple(tokens), logprobs=tuple(logprobs), versions=(version,) * len(tokens), text="", finish_reason="stop"
    )


def random_groups(vocab_size: int, *, groups: int = 3, size: int = 4, seed: int = 0) -> list[ScoredGroup]:
    """Groups of random tokens, of lengths 1 to 12, with random rewards."""
    rng = np.random.default_rng(seed)

    def tokens(longest: int) -> list[int]:
        return [int(token) for token in rng.integers(0, vocab_size, rng.integers(1, longest))]

    return [
        scored_group(
            [tokens(12) for _ in range(size)],
            [float(value) for value in rng.normal(size=size)],
            prompt=tokens(6),
            logprob=-1.2 * float(np.log(vocab_size)),
            group_id=index,
        )
        for index in range(groups)
    ]


def learner_model(
    policy: TrainablePolicy, settings: LearnerSection, distribution: SamplingDistribution
) -> LearnerModel:
    """Return a copy of the policy's model, which computes as that of a learner with these settings."""
    model = policy.copy_model()
    forcing = TeacherForcing(model.model, model.vocab_size, layout=settings.layout)
    return LearnerModel(model, forcing, distribution, UNDIVIDED)


def whole_gradient(
    policy: TrainablePolicy,
    groups: Sequence[ScoredGroup],
    settings: LearnerSection,
    *,
    distribution: SamplingDistribution,
    max_tokens: int = 100,
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient of a batch at the served parameters, all micro-batches added up in float64."""
    loss_config = LossConfig(settings, objective(settings.objective), initial_loss_coefficients(settings))
    model = learner_model(policy, settings, distribution)
    division, reference = Division(settings, max_tokens, model.forcing.layout), ReferencePolicy(policy, settings)
    batch = prepare(UpdateStart(groups, model, division, policy.trainable(), reference, loss_config))
    total, arrays = 0.0, {name: np.zeros(array.shape) for name, array in flat(policy.trainable()).items()}
    for micro, known in zip(batch.minibatches[0].micro_batches, batch.fixed_logprobs[0], strict=True):
        position = StepPosition(0, 0.0)
        part = model.gradient(policy.trainable(), micro, known, loss_config=loss_config, position=position)
        total += float(part.loss)
        for name, array in part.arrays.items():
            arrays[name] += np.array(array, dtype=np.float64)
    return total, arrays


def same_bits(first: Parameters, second: Parameters) -> bool:
    """Whether two trees hold the same arrays, bit for bit."""
    one, other = flat(first), flat(second)
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and bytes(memoryview(one[name])) == bytes(memoryview(other[name]))  # type: ignore[arg-type]
        for name in one
    )


def largest_difference(first: Parameters, second: Parameters) -> float:
    """Largest absolute difference of any element of two trees of equal shape."""
    one, other = flat(first), flat(second)
    assert one.keys() == other.keys()
    return max(float(np.abs(model_lanes.numpy(one[name]) - model_lanes.numpy(other[name])).max()) for name in one)
