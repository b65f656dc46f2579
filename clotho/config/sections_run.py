"""Sections of a profile about the run: checkpoints, evaluation, server, engine, queues, actors and environments."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clotho.config.bounds import NonNegative, Positive, PositiveFloat

KvPolicy = Literal["keep", "recompute", "drain"]


class ParitySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[parity] Comparison of the log-probabilities of the sampler with those of the learner."""

    tokens: Annotated[
        NonNegative,
        Meta(
            description="Number of tokens in the parity check at the start and after every weight swap; 0 disables it."
        ),
    ] = 4
    warn_nats: Annotated[
        PositiveFloat, Meta(description="A larger difference in the parity check, in nats, is logged as a warning.")
    ] = 0.05
    stop_nats: Annotated[
        PositiveFloat, Meta(description="A larger difference in the parity check, in nats, ends the run.")
    ] = 0.5


class CheckpointSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[checkpoint] Checkpoints of the whole run."""

    interval: Annotated[
        NonNegative, Meta(description="Number of steps between checkpoints; 0 writes one checkpoint at the end.")
    ] = 10
    keep_last: Annotated[Positive, Meta(description="Number of checkpoints that stay on disk.")] = 3
    adapter_path: Annotated[
        str,
        Meta(description="Directory that also receives the final adapter; if empty, only RUN_DIR/adapters does."),
    ] = ""


class EvalSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[eval] Greedy accuracy on held-out problems: before, after and during training."""

    enabled: Annotated[bool, Meta(description="Evaluate the policy on held-out problems.")] = True
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


class ServerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[server] The OpenAI-compatible HTTP server."""

    enabled: Annotated[bool, Meta(description="Serve the policy over HTTP during the run.")] = True
    host: Annotated[str, Meta(description="Address that the HTTP server binds.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the HTTP server; 0 takes any free port.")] = 8000
    api_key: Annotated[
        str, Meta(description="API key that every client must send; required unless the host is a loopback address.")
    ] = ""
    model_name: Annotated[str, Meta(description="Name of the policy in /v1/models.")] = "policy"
    max_concurrent: Annotated[
        Positive, Meta(description="Number of requests that are processed at once; further requests wait.")
    ] = 256
    max_choices: Annotated[
        Positive, Meta(description="Maximum number of completions of one request: prompts times n.")
    ] = 64
    max_body_bytes: Annotated[Positive, Meta(description="Maximum size of a request body in bytes.")] = 4_194_304
    body_seconds: Annotated[
        PositiveFloat, Meta(description="Maximum time in seconds in which a request body must arrive.")
    ] = 30.0


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[engine] The decode engine."""

    max_num_seqs: Annotated[Positive, Meta(description="Maximum number of sequences that are decoded at once.")] = 256
    kv_cache_tokens: Annotated[
        Positive, Meta(description="Capacity of the KV cache of all running sequences, in tokens.")
    ] = 262_144
    prefix_cache_tokens: Annotated[NonNegative, Meta(description="Capacity of the prefix cache, in tokens.")] = 16_384
    prefill_chunk: Annotated[Positive, Meta(description="Maximum number of prompt tokens per prefill step.")] = 2048
    decode_share: Annotated[
        float,
        Meta(
            ge=0.05,
            le=0.95,
            description="Fraction of the compute thread's time for decoding while the learner has work.",
        ),
    ] = 0.5
    kv_policy: Annotated[
        KvPolicy,
        Meta(
            description="KV cache of running sequences after a weight swap: keep it, recompute it with the new "
            "weights, or "
            "drain the running sequences before the swap."
        ),
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
    factory: Annotated[
        str,
        Meta(pattern=r"^[\w.]+:\w+$", title="module:name", description="Class of the custom actor, as module:Class."),
    ]
    mode: Annotated[
        Literal["replace", "insert", "tap", "add"],
        Meta(
            description="Position of the custom actor: replace the actor `at`, insert into or tap the queue "
            "`at`, or add "
            "an actor without queues."
        ),
    ]
    at: Annotated[
        str, Meta(description="Actor or queue that the custom actor replaces, is inserted into, or taps.")
    ] = ""
    restart: Annotated[
        Literal["permanent", "transient", "temporary"] | None,
        Meta(
            description="Restart policy of the custom actor, as in Erlang/OTP; the default depends on its "
            "position in the "
            "pipeline."
        ),
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


class AtroposSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[atropos] Groups from Atropos environments."""

    enabled: Annotated[
        bool, Meta(description="Train on groups from environments instead of data.train; evaluation does not change.")
    ] = False
    url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s/]+\S*)?$",
            title="http://HOST:PORT",
            description="Address of a running Atropos API server; if empty, atropos.python starts one.",
        ),
    ] = ""
    python: Annotated[
        str,
        Meta(description="Python interpreter with atroposlib, which runs the API server and the [[environments]]."),
    ] = ""
    mock: Annotated[
        bool, Meta(description="Make groups from data.train and [[rewards]] over the HTTP API, without atroposlib.")
    ] = False
    reset: Annotated[
        bool,
        Meta(
            description="Clear the state that a running Atropos API server keeps from another trainer; false "
            "resumes it."
        ),
    ] = True
    missing_logprobs: Annotated[
        Literal["recompute", "refuse"],
        Meta(
            description="Tokens without a log-probability in the group and in the sample log: recompute it with the "
            "serving weights, or refuse the group."
        ),
    ] = "refuse"
    max_tokens: Annotated[
        int, Meta(ge=2, description="Maximum length of an environment's sequence in tokens; longer ones are refused.")
    ] = 2048
    poll_seconds: Annotated[
        float, Meta(ge=0.05, le=60.0, description="Longest pause between two requests to the Atropos API server.")
    ] = 1.0
    patience_seconds: Annotated[
        PositiveFloat, Meta(description="A warning names the missing environments after this long without a group.")
    ] = 60.0


class EnvironmentSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[environments]] One Atropos environment, whose process is started and supervised by the run."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_-]{1,32}$",
            title="letters, digits, - and _, at most 32",
            description="Name of the environment in logs and metrics.",
        ),
    ]
    script: Annotated[
        str, Meta(min_length=1, description="Python file of the environment, run with its serve command.")
    ]
    weight: Annotated[
        PositiveFloat, Meta(description="Share of every batch, relative to the weights of the other environments.")
    ] = 1.0
    group_size: Annotated[
        Annotated[int, Meta(ge=2, le=4096)] | None,
        Meta(description="Completions per prompt of this environment; the default is sampling.group_size."),
    ] = None
    min_batch_allocation: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None,
        Meta(description="Minimum fraction of every batch for this environment; the default follows from its weight."),
    ] = None
    options: Annotated[
        dict[str, Any],
        Meta(
            description="Further flags of the environment's script as --env.KEY VALUE; a key with a dot is a full flag."
        ),
    ] = {}
