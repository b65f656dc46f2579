"""An update before the first prompt, of which nothing is kept: what cannot be learned fails before anything is asked."""

from __future__ import annotations

from array import array

import mlx.core as mx
from msgspec import Struct

from clotho.config.schema import Profile
from clotho.training.update import PolicyLearner
from protocols.errors import ClothoError, ModelError
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup, TeacherTokens
from protocols.sampling import Completion, restricts_support


class Size(Struct, frozen=True, kw_only=True):
    """completions: how many. tokens: of each, and of each prompt."""

    completions: int
    tokens: int


def rehearse(learner: PolicyLearner, profile: Profile, *, context: int) -> None:
    """Compute an update from made-up completions that fill a micro-batch; the learner stays as it is.

    So a model without gradients, an objective that fails, or a compiler that does, ends the run before its first
    prompt. It also pays what only a first update pays: memory that was never touched, kernels to be compiled. context:
    tokens that the policy can see. Raises ModelError where MLX, or code of the user's own, raised something else.
    """
    size = size_of(profile, context=context)
    whole, rest = divmod(size.completions, profile.sampling.group_size)
    counts = [profile.sampling.group_size] * whole + [rest] * (rest > 0)
    try:
        learner.rehearse([_group(number, count, size.tokens, profile) for number, count in enumerate(counts)])
        mx.clear_cache()  # of shapes that will not come again
    except ClothoError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelError(
            f"model {profile.model.path} cannot be trained by objective {profile.learner.objective}: {reason}"
        ) from error


def size_of(profile: Profile, *, context: int) -> Size:
    """As many completions of the longest length as an update has and `learner.micro_batch_tokens` allows; at least one.

    Prompts are as long as completions: the real ones are still being read.
    """
    budget = profile.learner.micro_batch_tokens
    tokens = max(1, min(profile.sampling.max_tokens, budget // 2, context // 2))
    most = profile.learner.batch_size * profile.sampling.group_size
    return Size(completions=max(1, min(most, budget // (2 * tokens))), tokens=tokens)


def _group(number: int, completions: int, tokens: int, profile: Profile) -> ScoredGroup:
    """Token 0, again and again, half of it praised and half of it blamed, with whatever the settings ask of a group."""
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
    prompt = Prompt(group_id=number, problem=Problem(prompt="", answer="", type=""), tokens=(0,) * tokens, seed=0)
    praise = tuple(1.0 if i % 2 else -1.0 for i in range(completions))
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, completions=(completion,) * completions),
        rewards=praise,
        parts={},
        token_advantages=tuple((value,) * tokens for value in praise),
        reference_logprobs=((-1.0,) * tokens,) * completions,
        teacher=(TeacherTokens(tokens=((0,),) * tokens, logprobs=((0.0,),) * tokens),) * completions,
    )
