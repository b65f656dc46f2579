"""Sections of a profile about the run: checkpoints, evaluation, server, engine, queues, actors and environments."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clotho.config.bounds import ModuleName, NonNegative, Positive, PositiveFloat, PositiveFraction, Variant

KvPolicy = Literal["keep", "recompute", "drain"]


class NoParityCheck(Variant, frozen=True, kw_only=True, tag="off"):
    """The log-probabilities are not compared."""


class ParityCheck(Variant, frozen=True, kw_only=True, tag="check"):
    """The log-probabilities are compared at the start and after every weight swap."""

    tokens: Annotated[Positive, Meta(description="Number of tokens that a parity check compares.")] = 4
    warn_nats: Annotated[PositiveFloat, Meta(description="A larger difference in nats is logged as a warning.")] = 0.05
    stop_nats: Annotated[PositiveFloat, Meta(description="A larger difference in nats ends the run.")] = 0.5


ParitySection = Annotated[
    NoParityCheck | ParityCheck, Meta(description="Comparison of the log-probabilities of sampler and learner.")
]


class CheckpointSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[checkpoint] Checkpoints of the whole run."""

    interval: Annotated[
        NonNegative, Meta(description="Number of steps between checkpoints; 0 writes one checkpoint at the end.")
    ] = 10
    keep_last: Annotated[Positive, Meta(description="Number of checkpoints that stay on disk.")] = 3
    adapter_path: Annotated[
        str, Meta(description="Directory that also receives the final adapter; if empty, only RUN_DIR/adapters does.")
    ] = ""


class NoEvaluation(Variant, frozen=True, kw_only=True, tag="off"):
    """The policy is not evaluated."""


class HeldOutEvaluation(Variant, frozen=True, kw_only=True, tag="heldout"):
    """Greedy accuracy on held-out problems: before, after and during training."""

    interval: Annotated[
        NonNegative,
        Meta(description="Number of steps between evaluations; 0 evaluates before and after training only."),
    ] = 0
    problems: Annotated[
        NonNegative, Meta(description="Number of held-out problems before and after training; 0 means all.")
    ] = 0
    problems_between: Annotated[
        NonNegative, Meta(description="Number of held-out problems during training; 0 means as many as eval.problems.")
    ] = 0


EvalSection = Annotated[
    NoEvaluation | HeldOutEvaluation, Meta(description="Evaluation of the policy on held-out problems.")
]


class NoServer(Variant, frozen=True, kw_only=True, tag="off"):
    """The policy is not served."""


class HttpServer(Variant, frozen=True, kw_only=True, tag="http"):
    """The policy is served over HTTP during the run."""

    host: Annotated[str, Meta(description="Address that the HTTP server binds.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the HTTP server; 0 takes any free port.")] = 8000
    api_key: Annotated[
        str, Meta(description="API key that every client must send; required unless the host is a loopback address.")
    ] = ""
    model_name: Annotated[str, Meta(description="Name of the policy in /v1/models.")] = "policy"
    max_concurrent: Annotated[Positive, Meta(description="Requests that are processed at once; others wait.")] = 256
    max_choices: Annotated[Positive, Meta(description="Maximum completions of a request: prompts times n.")] = 64
    max_body_bytes: Annotated[Positive, Meta(description="Maximum size of a request body in bytes.")] = 4_194_304
    body_seconds: Annotated[PositiveFloat, Meta(description="Time in which a request body must arrive.")] = 30.0


ServerSection = Annotated[NoServer | HttpServer, Meta(description="OpenAI-compatible HTTP server of the run.")]


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[engine] The decode engine."""

    max_num_seqs: Annotated[Positive, Meta(description="Maximum number of sequences that are decoded at once.")] = 256
    kv_cache_tokens: Annotated[Positive, Meta(description="Tokens of all running sequences in the KV cache.")] = 262_144
    prefix_cache_tokens: Annotated[NonNegative, Meta(description="Capacity of the prefix cache, in tokens.")] = 16_384
    prefill_chunk: Annotated[Positive, Meta(description="Maximum number of prompt tokens per prefill step.")] = 2048
    decode_share: Annotated[
        float, Meta(ge=0.05, le=0.95, description="Fraction of compute time for decoding while the learner has work.")
    ] = 0.5
    kv_policy: Annotated[
        KvPolicy,
        Meta(description="KV cache after a weight swap: keep it, recompute it, or drain the sequences before."),
    ] = "keep"


class RolloutsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[rollouts] How far rollouts run ahead of the learner."""

    max_batches_ahead: Annotated[
        Positive, Meta(description="Maximum number of batches in progress beyond the batch that is being trained on.")
    ] = 2


class QueuesSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[queues] Capacities of the queues between actors; a full queue blocks its sender."""

    prompts: Annotated[Positive, Meta(description="Capacity of the queue from the prompter to the generator.")] = 16
    rollouts: Annotated[Positive, Meta(description="Capacity of the queue from the generator to the scorer.")] = 16
    scored: Annotated[Positive, Meta(description="Capacity of the queue of scored groups to the learner.")] = 16
    reports: Annotated[Positive, Meta(description="Capacity of the queues of step reports from the learner.")] = 4


class ActorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[actors]] An actor of your own."""

    name: Annotated[str, Meta(min_length=1, description="Name of the custom actor in logs, errors and statistics.")]
    factory: Annotated[ModuleName, Meta(description="Class of the custom actor, as module:Class.")]
    mode: Annotated[
        Literal["replace", "insert", "tap", "add"],
        Meta(description="Position: replace the actor `at`, insert into or tap the queue `at`, or add without queues."),
    ]
    at: Annotated[str, Meta(description="Actor that is replaced, or queue that is tapped or inserted into.")] = ""
    restart: Annotated[
        Literal["permanent", "transient", "temporary"] | None,
        Meta(description="Restart policy of the custom actor, as in Erlang/OTP; the default depends on its position."),
    ] = None
    options: Annotated[dict[str, Any], Meta(description="Keyword arguments for the custom actor's class.")] = {}

    @property
    def is_in_group_flow(self) -> bool:
        """Whether groups pass through the actor, so that its failure ends the run; false for a monitor."""
        return self.mode == "insert" or (self.mode == "replace" and self.at != "monitor")


class MonitorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[monitor] Output of the run."""

    display: Annotated[
        Literal["auto", "live", "plain", "none"],
        Meta(description="Terminal output; auto is live on a terminal and plain lines elsewhere."),
    ] = "auto"
    rollouts: Annotated[bool, Meta(description="Write every rollout to rollouts.jsonl.")] = True
    watchdog_seconds: Annotated[
        PositiveFloat, Meta(description="A compute thread that makes no progress for this long is reported.")
    ] = 120.0
    cache_limit_mb: Annotated[Positive, Meta(description="Limit of MLX's cache of freed buffers, in MiB.")] = 512


class NoAtropos(Variant, frozen=True, kw_only=True, tag="off"):
    """Groups are sampled from the problems of data.train."""


class AtroposSource(Variant, frozen=True, kw_only=True):
    """Groups come through the Atropos API instead of data.train; evaluation does not change."""

    max_tokens: Annotated[int, Meta(ge=2, description="Longer sequences of environments are refused.")] = 2048
    poll_seconds: Annotated[float, Meta(ge=0.05, le=60.0, description="Longest pause between two requests.")] = 1.0
    patience_seconds: Annotated[
        PositiveFloat, Meta(description="A warning names the missing environments after this long without a group.")
    ] = 60.0


Interpreter = Annotated[str, Meta(description="Python interpreter with atroposlib, which runs the [[environments]].")]


class EnvironmentSource(AtroposSource, frozen=True, kw_only=True):
    """Groups come from environments."""

    python: Interpreter = ""
    missing_logprobs: Annotated[
        Literal["recompute", "refuse"],
        Meta(description="Recompute log-probabilities that are missing in group and sample log, or refuse the group."),
    ] = "refuse"


class StartedServer(EnvironmentSource, frozen=True, kw_only=True, tag="start"):
    """The run starts an Atropos API server and the [[environments]]."""

    python: Interpreter


class RunningServer(EnvironmentSource, frozen=True, kw_only=True, tag="connect"):
    """The run connects to an Atropos API server that is already running."""

    url: Annotated[
        str,
        Meta(pattern=r"^https?://[^\s/]+\S*$", title="http://HOST:PORT", description="Address of the API server."),
    ]
    reset: Annotated[
        bool, Meta(description="Clear the state that the server keeps from another trainer; false resumes it.")
    ] = True


class MockSource(AtroposSource, frozen=True, kw_only=True, tag="mock"):
    """The run itself makes groups from data.train and [[rewards]] over the HTTP API, without atroposlib."""


AtroposSection = Annotated[
    NoAtropos | StartedServer | RunningServer | MockSource,
    Meta(description="Source of groups: data.train, or environments through an Atropos API server."),
]


class EnvironmentSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[environments]] One Atropos environment, whose process is started and supervised by the run."""

    name: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$", title="letters, digits, - and _, at most 32"),
        Meta(description="Name of the environment in logs and metrics."),
    ]
    script: Annotated[str, Meta(min_length=1, description="Python file of the environment, run with serve.")]
    weight: Annotated[PositiveFloat, Meta(description="Relative share of the environment in every batch.")] = 1.0
    group_size: Annotated[
        Annotated[int, Meta(ge=2, le=4096)] | None,
        Meta(description="Completions per prompt of this environment; the default is sampling.group_size."),
    ] = None
    min_batch_allocation: Annotated[
        PositiveFraction | None,
        Meta(description="Minimum fraction of every batch for this environment; the default follows from its weight."),
    ] = None
    options: Annotated[
        dict[str, Any], Meta(description="Further flags of the script, as --env.KEY; a key with a dot is a full flag.")
    ] = {}
