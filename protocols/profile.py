"""The profile: every setting of a run, as frozen structs that refuse unknown keys and bound every number.

A docstring under each section explains its keys; `docs/configuration.md` is generated from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from protocols.sampling import Sampling

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Meta(gt=0.0)]
NonNegativeFloat = Annotated[float, Meta(ge=0.0)]


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[model] Which base model.

    path: a directory, or a repository of the Hugging Face hub.
    dtype: computing type; `auto` is float32 on the CPU and the checkpoint's own on a GPU.
    dequantize: expand a quantised base at load; much faster on the CPU, several times the memory.
    trust_remote_code: let the model's tokenizer run code of its own.
    """

    path: Annotated[str, Meta(min_length=1)]
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    dequantize: bool = False
    trust_remote_code: bool = False


class PolicySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[policy] What is trained.

    kind: `lora` trains an adapter (QLoRA where the base is quantised), `full` every weight.
    rank, dropout: of the adapter. scale: multiplies its output, as mlx-lm counts (absolute).
    alpha: as PEFT counts, scale = alpha / rank; give one of the two. Neither: scale = 10.
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
    """[sampling] How rollouts are drawn; the keys of `protocols.sampling.Sampling`, and group_size per prompt."""

    group_size: Annotated[int, Meta(ge=2, le=4096)] = 8


class DataSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[data] Problems to train on and to be measured by: JSON lines, or one JSON list.

    train, heldout: files; without `heldout`, `heldout_fraction` of the training file is set aside.
    prompt_key, answer_key, type_key: columns of the file. default_type: where a line names no type.
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

    batch_size: prompts per update. micro_batch_tokens: padded tokens per gradient pass; any split, same gradient.
    learning_rate, schedule, warmup_steps, min_learning_rate: `cosine` and `linear` fall to the minimum at the last step.
    beta1, beta2, epsilon, weight_decay: AdamW with bias correction. max_grad_norm: global clipping; 0 = off.
    clip_low, clip_high: the ratio stays in [1 - clip_low, 1 + clip_high] (clip-higher: DAPO).
    correction: `none`: the ratio is against the sampler's log-probabilities; `truncate`: it is against the learner's
        own, and each token weighs min(learner / sampler, correction_cap) (truncated importance sampling).
    kl_beta, kl_estimator: penalty towards the reference (the adapter switched off): k1, k2, k3 or abs.
    entropy_weight: bonus per nat. advantage_epsilon: added to the group's deviation.
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


class WeightsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[weights] How new weights take over.

    kv_policy: what becomes of the caches of running sequences: `keep`, `recompute`, or `drain` (finish them first).
    probe_tokens: tokens compared between sampler and learner at the start and after every swap; 0 = never.
    probe_warn, probe_stop: largest difference in nats that is reported, and that ends the run.
    """

    kv_policy: Literal["keep", "recompute", "drain"] = "keep"
    probe_tokens: NonNegative = 4
    probe_warn: PositiveFloat = 0.05
    probe_stop: PositiveFloat = 0.5


class CheckpointSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[checkpoint] Snapshots of the whole run.

    interval: steps between them; 0 = only at the end. keep_last: how many stay on disk.
    adapter_path: also write the final adapter here; empty = only RUN_DIR/adapters.
    """

    interval: NonNegative = 10
    keep_last: Positive = 3
    adapter_path: str = ""


class EvalSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[eval] Greedy accuracy on held-out problems, on pinned weights: before, after, and in between.

    interval: steps between measurements; 0 = only before and after. problems: how many; 0 = all.
    interim_problems: how many in between; 0 = as many as `problems`.
    """

    enabled: bool = True
    interval: NonNegative = 0
    problems: NonNegative = 0
    interim_problems: NonNegative = 0


class GatewaySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[gateway] The OpenAI-compatible HTTP server.

    port: 0 = any free one. api_key: required of every client if set; required to bind beyond the loopback.
    model_name: what /v1/models calls the policy. max_concurrent: requests beyond are answered 503.
    max_choices: the largest `n`. max_body_bytes, body_seconds: limits on a request's body.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    api_key: str = ""
    model_name: str = "policy"
    max_concurrent: Positive = 256
    max_choices: Positive = 64
    max_body_bytes: Positive = 4_194_304
    body_seconds: PositiveFloat = 30.0


class GeneratorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[generator] The decode engine and how far it runs ahead of the learner.

    batches_ahead: batches that may be in flight beyond the one being learnt; `async = false` makes it 0.
    max_rows: sequences decoded at once. max_cache_tokens: bound of all their key-value caches, in tokens.
    prefix_cache_tokens: bound of the cache of computed prompts. prefill_chunk: prompt tokens per tick.
    decode_share: part of the compute thread's time given to decoding while the learner has work.
    """

    batches_ahead: Positive = 2
    max_rows: Positive = 256
    max_cache_tokens: Positive = 262_144
    prefix_cache_tokens: NonNegative = 16_384
    prefill_chunk: Positive = 2048
    decode_share: Annotated[float, Meta(ge=0.05, le=0.95)] = 0.5


class MailboxesSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[mailboxes] Capacities of the arrows, in messages."""

    prompts: Positive = 16
    rollouts: Positive = 16
    scored: Positive = 16
    reports: Positive = 4


class ActorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[actors]] An actor of your own; docs/actors.md shows each mode.

    factory: `module:Class`. mode: `replace` the box named in `at`; `insert` on, or `tap`, the arrow named in `at`;
    `add` a free-standing one. restart: as in OTP. options: handed to the factory as keyword arguments.
    """

    name: Annotated[str, Meta(min_length=1)]
    factory: Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")]
    mode: Literal["replace", "insert", "tap", "add"]
    at: str = ""
    restart: Literal["permanent", "transient", "temporary"] = "temporary"
    options: dict[str, Any] = {}


class MonitorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[monitor] What is shown and written while the run goes on.

    display: `auto` is live on a terminal and plain lines elsewhere. rollouts: write rollouts.jsonl.
    watchdog_seconds: a compute thread that does not move for so long is reported, also on /health.
    cache_limit_mb: MLX's cache of freed buffers.
    """

    display: Literal["auto", "live", "plain", "none"] = "auto"
    rollouts: bool = True
    watchdog_seconds: PositiveFloat = 120.0
    cache_limit_mb: Positive = 512


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a run. `steps` batches are consumed; `asynchronous` (`async`) lets rollouts run ahead."""

    model: ModelSection
    data: DataSection
    rewards: Annotated[tuple[RewardSection, ...], Meta(min_length=1)]
    steps: Positive = 100
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    asynchronous: bool = field(name="async", default=True)
    run_dir: str = "runs/{profile}"
    policy: PolicySection = PolicySection()
    sampling: SamplingSection = SamplingSection()
    learner: LearnerSection = LearnerSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    gateway: GatewaySection = GatewaySection()
    generator: GeneratorSection = GeneratorSection()
    mailboxes: MailboxesSection = MailboxesSection()
    monitor: MonitorSection = MonitorSection()
    actors: tuple[ActorSection, ...] = ()
