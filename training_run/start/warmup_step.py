"""The warmup step: one update before the first prompt, whose result is discarded.

A model that cannot be trained with these settings ends the run before any rollout is sampled.
"""

from __future__ import annotations

from array import array

import mlx.core as mx
from msgspec import Struct

from clotho.settings.objectives import Custom
from clotho.training.update import PolicyLearner
from protocols.errors import ClothoError, ModelError
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup, TeacherTokens
from protocols.sampling import Completion, restricts_support
from training_run.profile.schema import Profile


class DummyBatchSize(Struct, frozen=True, kw_only=True):
    """completions: number of completions. tokens: length of each completion, and of each prompt."""

    completions: int
    tokens: int


def run_warmup_step(learner: PolicyLearner, profile: Profile, *, context: int) -> None:
    """Compute an update from dummy completions that fill a micro-batch; the learner does not change.

    It detects a model without gradients and an objective that fails, and it pays the costs of a first update: memory
    that was never touched, kernels that must be compiled. context: context length of the model. Raises ModelError if
    MLX or a custom objective raises another error.
    """
    try:
        learner.compute_and_discard(dummy_groups(profile, dummy_batch_size(profile, context=context)))
        mx.clear_cache()  # buffers of shapes that do not occur again
    except ClothoError:
        raise
    except Exception as error:
        chosen = profile.learner.objective
        objective = chosen.function if isinstance(chosen, Custom) else chosen.__struct_config__.tag
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelError(f"model {profile.model.path} cannot be trained by objective {objective}: {reason}") from error


def dummy_groups(profile: Profile, size: DummyBatchSize) -> list[ScoredGroup]:
    """Return groups of made-up completions."""
    whole, rest = divmod(size.completions, profile.sampling.group_size)
    counts = [profile.sampling.group_size] * whole + [rest] * (rest > 0)
    return [_dummy_group(number, count, size.tokens, profile) for number, count in enumerate(counts)]


def dummy_batch_size(profile: Profile, *, context: int) -> DummyBatchSize:
    """Return as many completions of the longest length as an update has and `learner.micro_batch_tokens` allows.

    At least one completion. Prompts are as long as completions, because the dataset is still being read.
    """
    budget = profile.learner.micro_batch_tokens
    tokens = max(1, min(profile.sampling.max_tokens, budget // 2, context // 2))
    most = profile.learner.batch_size * profile.sampling.group_size
    return DummyBatchSize(completions=max(1, min(most, budget // (2 * tokens))), tokens=tokens)


def _dummy_group(number: int, completions: int, tokens: int, profile: Profile) -> ScoredGroup:
    """Return a group of completions of token 0, half with advantage +1 and half with -1, shaped like a real group."""
    top_k = profile.sampling.top_k if restricts_support(profile.sampling) else 0
    support = array("I", range(top_k)).tobytes()
    completion = Completion(
        tokens=(0,) * tokens,
        logprobs=(-1.0,) * tokens,
        versions=(0,) * tokens,
        text="",
        finish_reason="stop",
        supports=(support,) * tokens if support else (),
    )
    prompt = Prompt(group_id=number, problem=Problem(prompt=""), tokens=(0,) * tokens, seed=0)
    rewards = tuple(1.0 if i % 2 else -1.0 for i in range(completions))
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, completions=(completion,) * completions),
        rewards=rewards,
        parts={},
        token_advantages=tuple((value,) * tokens for value in rewards),
        reference_logprobs=((-1.0,) * tokens,) * completions,
        teacher=(TeacherTokens(tokens=((0,),) * tokens, logprobs=((0.0,),) * tokens),) * completions,
    )
