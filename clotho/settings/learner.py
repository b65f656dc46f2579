"""Settings of the learner."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from clotho.settings.bounds import (
    FractionBelowOne,
    NonNegative,
    NonNegativeFloat,
    Off,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Variant,
    ZeroIsOff,
    ZeroIsOffFloat,
    about,
)
from clotho.settings.objectives import Grpo, Objective, ReferencedPreference

Estimator = Literal["k1", "k2", "k3", "abs"]
Layout = Literal["auto", "padded", "packed", "shared"]
RouterReplay = Literal["auto", "on", "off"]
EntropyCoefficient = Annotated[NonNegativeFloat, about("Entropy coefficient at the first update.")]
Beta1 = Annotated[FractionBelowOne, about("Decay of the moving average of the gradient.")]
Beta2 = Annotated[FractionBelowOne, about("Decay of the moving average of the squared gradient.")]
Epsilon = Annotated[PositiveFloat, about("Constant added to the root of the average squared gradient.")]
Momentum = Annotated[FractionBelowOne, about("Share of the accumulated gradient that each step keeps.")]


class OptimizerSettings(Variant, frozen=True, kw_only=True):
    """The settings that every optimizer has."""

    usual_rates: ClassVar[tuple[float, float]] = (1e-4, 1e-6)
    """Learning rates of an adapter and of all weights."""

    learning_rate: Annotated[
        PositiveFloat | None, about("Highest learning rate; none: 1e-4 with an adapter, 1e-6 without; lion: a tenth.")
    ] = None
    weight_decay: Annotated[NonNegativeFloat, about("Decoupled weight decay per unit of step size.")] = 0.0

    @property
    def highest_rate(self) -> float:
        """The learning rate of an adapter, if none is given."""
        return self.usual_rates[0] if self.learning_rate is None else self.learning_rate


class AdamW(OptimizerSettings, frozen=True, kw_only=True, tag="adamw"):
    """AdamW with bias correction (arXiv:1711.05101)."""

    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.999
    epsilon: Epsilon = 1e-8


class Adafactor(OptimizerSettings, frozen=True, kw_only=True, tag="adafactor"):
    """Adafactor with a factored second moment and no momentum (arXiv:1804.04235)."""


class Lion(OptimizerSettings, frozen=True, kw_only=True, tag="lion"):
    """Lion, which steps by the sign of an average of gradients (arXiv:2302.06675)."""

    usual_rates: ClassVar[tuple[float, float]] = (1e-5, 1e-7)

    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.99


class Muon(OptimizerSettings, frozen=True, kw_only=True, tag="muon"):
    """Muon for hidden matrices and AdamW for all other parameters."""

    momentum: Momentum = 0.9
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.999
    epsilon: Epsilon = 1e-8


class Sgd(OptimizerSettings, frozen=True, kw_only=True, tag="sgd"):
    """Stochastic gradient descent with momentum."""

    momentum: Momentum = 0.9


Optimizer = AdamW | Adafactor | Lion | Muon | Sgd


class ScheduleSettings(Variant, frozen=True, kw_only=True):
    """The settings that every schedule has."""

    warmup_steps: Annotated[NonNegative, about("Steps of the linear rise of the learning rate.")] = 5


class ConstantSchedule(ScheduleSettings, frozen=True, kw_only=True, tag="constant"):
    """The learning rate stays constant after the warm-up."""


class DecaySchedule(ScheduleSettings, frozen=True, kw_only=True):
    """A schedule whose learning rate falls after the warm-up."""

    min_learning_rate: Annotated[NonNegativeFloat, about("Learning rate one step after the last.")] = 0.0


class LinearSchedule(DecaySchedule, frozen=True, kw_only=True, tag="linear"):
    """The learning rate falls linearly after the warm-up."""


class CosineSchedule(DecaySchedule, frozen=True, kw_only=True, tag="cosine"):
    """The learning rate falls along half a cosine after the warm-up."""


Schedule = ConstantSchedule | LinearSchedule | CosineSchedule


class EssStepScale(Variant, frozen=True, kw_only=True, tag="ess"):
    """A power of the effective sample size of completions scales the learning rate of each step (arXiv:2602.17616)."""

    exponent: Annotated[PositiveFloat, about("Exponent; 0.5 suits adaptive optimizers, 1 suits sgd.")] = 0.5
    base: Annotated[PositiveFraction, about("Effective sample size from which on the learning rate is not scaled.")] = (
        1.0
    )


StepScale = Off | EssStepScale


class BaseReference(Variant, frozen=True, kw_only=True, tag="base"):
    """The base model, without adapter."""


class SnapshotReference(Variant, frozen=True, kw_only=True, tag="snapshot"):
    """A snapshot of the policy."""

    interval: Annotated[NonNegative, about("Updates between two snapshots; 0 keeps the first.")] = 0


class AverageReference(Variant, frozen=True, kw_only=True, tag="average"):
    """An exponential moving average of the policy."""

    decay: Annotated[float, about("Share that the average keeps per update.", gt=0.0, lt=1.0)] = 0.99


class EnvironmentReference(Variant, frozen=True, kw_only=True, tag="environment"):
    """The reference policy of the environment; its log-probabilities are part of the groups."""


Reference = BaseReference | SnapshotReference | AverageReference | EnvironmentReference


class FixedCoefficient(Variant, frozen=True, kw_only=True, tag="fixed"):
    """The coefficient of the KL penalty stays constant."""


class AdaptiveCoefficient(Variant, frozen=True, kw_only=True, tag="adaptive"):
    """The coefficient of the KL penalty follows the measured divergence (arXiv:1909.08593)."""

    target: Annotated[PositiveFloat, about("Divergence from the reference to aim at, in nats per token.")]
    horizon: Annotated[Positive, about("Number of updates over which the coefficient adapts.")] = 100


Control = Annotated[FixedCoefficient | AdaptiveCoefficient, about("Whether the KL coefficient adapts.")]


class KLPenalty(Variant, frozen=True, kw_only=True):
    """A penalty for the divergence from a reference policy."""

    coef: Annotated[PositiveFloat, about("Coefficient of the KL penalty.")] = 0.04
    estimator: Annotated[Estimator, about("KL estimator per token; k2, half the squared log-ratio, is mse.")] = "k3"
    control: Control = FixedCoefficient()
    reference: Annotated[Reference, about("Reference policy of the KL penalty.")] = BaseReference()


class LossKLPenalty(KLPenalty, frozen=True, kw_only=True, tag="loss"):
    """The KL penalty is added to the loss."""

    importance_weighted: Annotated[bool, about("Weight the estimate by the importance ratio.")] = False


class RewardKLPenalty(KLPenalty, frozen=True, kw_only=True, tag="reward"):
    """The KL penalty is subtracted from the reward."""


class FixedEntropyBonus(Variant, frozen=True, kw_only=True, tag="fixed"):
    """An entropy bonus whose coefficient is constant or decays."""

    coef: EntropyCoefficient
    decay: Annotated[PositiveFraction, about("Factor of the entropy coefficient per update.")] = 1.0


class AdaptiveEntropyBonus(Variant, frozen=True, kw_only=True, tag="adaptive"):
    """An entropy bonus whose coefficient follows the measured entropy (arXiv:2505.22312)."""

    coef: EntropyCoefficient = 0.0
    target: Annotated[PositiveFloat, about("Entropy in nats per token below which the coefficient rises.")]
    step: Annotated[PositiveFloat, about("Change of the entropy coefficient per update.")] = 1e-4


AnyKLPenalty = Off | LossKLPenalty | RewardKLPenalty
EntropyBonus = Off | FixedEntropyBonus | AdaptiveEntropyBonus


class LearnerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy update."""

    objective: Annotated[Objective, about("Objective of the learner: the loss that it minimizes.")] = Grpo()
    optimizer: Annotated[Optimizer, about("Optimizer that turns gradients into steps.")] = AdamW()
    schedule: Annotated[Schedule, about("Learning rate after the warm-up.")] = ConstantSchedule()
    step_scale: Annotated[StepScale, about("Scale of the learning rate for stale rollouts.")] = Off()
    kl_penalty: Annotated[AnyKLPenalty, about("Penalty for the divergence from a reference.")] = Off()
    entropy_bonus: Annotated[EntropyBonus, about("Bonus for the policy's entropy.")] = Off()
    distillation_weight: Annotated[NonNegativeFloat, about("Weight of what a teacher says in the loss.")] = 0.0
    batch_size: Annotated[Positive, about("Number of prompts (groups) per update.")] = 16
    update_epochs: Annotated[Positive, about("Number of passes over each batch.")] = 1
    num_minibatches: Annotated[Positive, about("Number of optimizer steps per pass over the batch.")] = 1
    micro_batch_tokens: Annotated[Positive, about("Padded tokens per forward and backward pass.")] = 1024
    max_turn_ms: Annotated[ZeroIsOffFloat, about("Longest turn of updates and prefill in ms; 0: no limit.")] = 250.0
    layout: Annotated[Layout, about("Rows of a micro-batch; shared: one prompt; auto: padded or shared.")] = "auto"
    router_replay: Annotated[
        RouterReplay, about("Experts of the sampler replace the learner's; auto: if the parity check finds others.")
    ] = "auto"
    max_grad_norm: Annotated[ZeroIsOffFloat, about("Limit on the gradient's norm; 0 means none.")] = 1.0
    lora_plus: Annotated[float, about("Factor of the B matrices' learning rate (LoRA+).", ge=1.0)] = 1.0
    max_staleness: Annotated[
        NonNegative | None,
        about("Groups that are more versions old are discarded; none: 2 x max_batches_ahead."),
    ] = None
    max_bad_steps: Annotated[Positive, about("Limit of non-finite updates in a row; then the run ends.")] = 5
    max_failed_batches: Annotated[
        ZeroIsOff,
        about(
            "Batches in a row in which a reward or environment fails for every group; then the run ends. 0: no limit."
        ),
    ] = 3
    max_equal_batches: Annotated[
        ZeroIsOff, about("Batches in a row of groups with equal rewards; then the run ends. 0: no limit.")
    ] = 20

    @property
    def reference(self) -> Reference | None:
        """The reference policy of the objective, else of the KL penalty; None without either."""
        if isinstance(self.objective, ReferencedPreference):
            return BaseReference() if self.objective.reference == "base" else SnapshotReference()
        return None if isinstance(self.kl_penalty, Off) else self.kl_penalty.reference

    def with_rate(self, *, in_full: bool) -> LearnerSection:
        """Return the settings with the learning rate that `none` stands for. in_full: all weights are trained."""
        if self.optimizer.learning_rate is not None:
            return self
        rate = self.optimizer.usual_rates[in_full]
        return replace(self, optimizer=replace(self.optimizer, learning_rate=rate))
