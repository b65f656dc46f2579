"""Sections of a profile that say what is learnt: model, policy, sampling, data, rewards, learner.

A section's docstring has one line per key (`key: text`, or `key, key: text`); `--help` and `docs/configuration.md`
are generated from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocols.profile_bounds import NonNegative, NonNegativeFloat, Positive, PositiveFloat
from protocols.sampling import Sampling


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[model] Which base model.

    path: a directory, or a repository of the Hugging Face hub.
    dtype: computing type; `auto` is float32 on the CPU and the checkpoint's own on a GPU.
    dequantize: expand a quantised base at load; much faster on the CPU, several times the memory.
    trust_remote_code: let the model and its tokenizer run code of their own.
    """

    path: Annotated[str, Meta(min_length=1)]
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    dequantize: bool = False
    trust_remote_code: bool = False


class PolicySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[policy] What is trained.

    kind: `lora` trains an adapter (QLoRA where the base is quantised), `full` every weight.
    rank: of the adapter.
    scale: multiplies the adapter's output, as mlx-lm counts (absolute); without `scale` and `alpha` it is 10.
    alpha: as PEFT counts, scale = alpha / rank; give one of the two.
    dropout: on the adapter's input, while gradients are computed.
    num_layers: how many blocks, from the last; -1 = all.
    target_modules: block-relative names such as `self_attn.q_proj`; empty = every linear layer of a block.
    grad_checkpoint: recompute each block's activations in the backward pass: less memory, more time.
    """

    kind: Literal["lora", "full"] = "lora"
    rank: Positive = 8
    scale: PositiveFloat | None = None
    alpha: PositiveFloat | None = None
    dropout: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    num_layers: Annotated[int, Meta(ge=-1)] = -1
    target_modules: tuple[str, ...] = ()
    grad_checkpoint: bool = False

    @property
    def effective_scale(self) -> float:
        """The adapter's absolute scale."""
        if self.scale is not None:
            return self.scale
        return self.alpha / self.rank if self.alpha is not None else 10.0


class SamplingSection(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[sampling] How rollouts are drawn; the keys of `protocols.sampling.Sampling`, and one more.

    group_size: completions per prompt.
    """

    group_size: Annotated[int, Meta(ge=2, le=4096)] = 8


class DataSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[data] Problems to train on and to be measured by: JSON lines, or one JSON list.

    train: file of the problems that are trained on.
    heldout: file of the problems that measure; empty = `heldout_fraction` of the training file is set aside.
    heldout_fraction: share of the training file that is set aside where `heldout` is empty.
    prompt_key, answer_key, type_key: column of the file.
    default_type: kind of a problem whose line names none.
    system: a system message put before every prompt; empty = none.
    shuffle: a new order every epoch, by seed; otherwise the file's order.
    """

    train: Annotated[str, Meta(min_length=1)]
    heldout: str = ""
    heldout_fraction: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.1
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    type_key: str = "type"
    default_type: str = "problem"
    system: str = ""
    shuffle: bool = True


class RewardSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[rewards]] One reward function; a completion's reward is the weighted sum of those that apply.

    name: format, math_eval, jaccard, choice_correctness, exact; or `module:function`.
    weight: factor of its value in the sum.
    types: kinds of problem it applies to; empty = all.
    timeout_seconds: a call that takes longer discards its group.
    correct: its value 1.0 means that the answer is right: evaluation counts it.
    """

    name: Annotated[str, Meta(min_length=1)]
    weight: float = 1.0
    types: tuple[str, ...] = ()
    timeout_seconds: PositiveFloat = 10.0
    correct: bool = False


class LearnerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[learner] The policy update.

    batch_size: prompts per update.
    micro_batch_tokens: padded tokens per gradient pass; any split, same gradient.
    learning_rate: the highest, after warm-up.
    schedule: after warm-up; `cosine` and `linear` fall to `min_learning_rate` at the last step.
    warmup_steps: linear rise from nothing to `learning_rate`.
    min_learning_rate: where `cosine` and `linear` end.
    beta1, beta2, epsilon, weight_decay: AdamW with bias correction.
    max_grad_norm: global clipping; 0 = off.
    clip_low, clip_high: beyond [1 - clip_low, 1 + clip_high] the ratio gains nothing more (clip-higher: DAPO).
    correction: `none`: the ratio is against the sampler's log-probabilities; `truncate`: it is against the learner's
        own, and each token weighs min(learner / sampler, correction_cap) (truncated importance sampling).
    correction_cap: the largest weight under `truncate`.
    kl_beta: weight of the penalty towards the reference (the adapter switched off); 0 = none.
    kl_estimator: of that penalty, per token.
    entropy_weight: bonus per nat.
    advantage_epsilon: added to the group's deviation.
    max_staleness: groups drawn by weights older than this many versions are discarded.
    max_bad_steps: so many updates in a row that are not finite end the run.
    """

    batch_size: Positive = 16
    micro_batch_tokens: Positive = 8192
    learning_rate: PositiveFloat = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: NonNegative = 0
    min_learning_rate: NonNegativeFloat = 0.0
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0
    clip_low: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.2
    clip_high: PositiveFloat = 0.28
    correction: Literal["none", "truncate"] = "none"
    correction_cap: Annotated[float, Meta(ge=1.0)] = 2.0
    kl_beta: NonNegativeFloat = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    entropy_weight: NonNegativeFloat = 0.0
    advantage_epsilon: PositiveFloat = 1e-4
    max_staleness: NonNegative = 4
    max_bad_steps: Positive = 5
