"""Sections of a profile about the run: checkpoints, evaluation, server, engine, queues, actors and environments."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clotho.config.bounds import ModuleName, NonNegative, Off, Positive, PositiveFloat, PositiveFraction, Variant, about

Mode = Literal["replace", "insert", "tap", "add"]
Restart = Literal["permanent", "transient", "temporary"]
Display = Literal["auto", "live", "plain", "none"]
EnvironmentName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$", title="letters, digits, - and _, at most 32")]
GroupSize = Annotated[int, Meta(ge=2, le=4096)]
Interpreter = Annotated[str, about("Python interpreter with atroposlib, which runs the [[environments]].")]
Missing = Literal["recompute", "refuse"]
KvPolicy = Literal["keep", "recompute", "drain"]


class ParityCheck(Variant, frozen=True, kw_only=True, tag="check"):
    """The log-probabilities are compared at the start and after every weight swap."""

    tokens: Annotated[Positive, about("Number of tokens that a parity check compares.")] = 4
    warn_nats: Annotated[PositiveFloat, about("A larger difference in nats is logged as a warning.")] = 0.05
    stop_nats: Annotated[PositiveFloat, about("A larger difference in nats ends the run.")] = 0.5


ParitySection = Annotated[Off | ParityCheck, about("Comparison of sampler and learner log-probabilities.")]


class CheckpointSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints of the whole run."""

    interval: Annotated[NonNegative, about("Steps between checkpoints; 0 writes one at the end.")] = 10
    keep_last: Annotated[Positive, about("Number of checkpoints that stay on disk.")] = 3
    adapter_path: Annotated[str, about("Directory of a second copy of the final adapter; empty: no copy.")] = ""


class HeldOutEvaluation(Variant, frozen=True, kw_only=True, tag="heldout"):
    """Greedy accuracy on held-out problems: before, after and during training."""

    interval: Annotated[NonNegative, about("Steps between evaluations; 0: before and after training.")] = 0
    problems: Annotated[NonNegative, about("Number of held-out problems before and after training; 0 means all.")] = 0
    problems_between: Annotated[NonNegative, about("Held-out problems during training; 0: eval.problems.")] = 0


EvalSection = Annotated[Off | HeldOutEvaluation, about("Evaluation of the policy on held-out problems.")]


class HttpServer(Variant, frozen=True, kw_only=True, tag="http"):
    """The policy is served over HTTP during the run."""

    host: Annotated[str, about("Address that the HTTP server binds.")] = "127.0.0.1"
    port: Annotated[int, about("Port of the HTTP server; 0 takes any free port.", ge=0, le=65535)] = 8000
    api_key: Annotated[str, about("API key of clients; required unless the host is a loopback address.")] = ""
    model_name: Annotated[str, about("Name of the policy in /v1/models.")] = "policy"
    max_concurrent: Annotated[Positive, about("Requests that are processed at once; others wait.")] = 256
    max_choices: Annotated[Positive, about("Maximum completions of a request: prompts times n.")] = 64
    max_body_bytes: Annotated[Positive, about("Maximum size of a request body in bytes.")] = 4_194_304
    body_seconds: Annotated[PositiveFloat, about("Time in which a request body must arrive.")] = 30.0


ServerSection = Annotated[Off | HttpServer, about("OpenAI-compatible HTTP server of the run.")]


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decode engine."""

    max_num_seqs: Annotated[Positive, about("Maximum number of sequences that are decoded at once.")] = 256
    kv_cache_tokens: Annotated[Positive, about("Tokens of all running sequences in the KV cache.")] = 262_144
    prefix_cache_tokens: Annotated[NonNegative, about("Capacity of the prefix cache, in tokens.")] = 16_384
    prefill_chunk: Annotated[Positive, about("Maximum number of prompt tokens per prefill step.")] = 2048
    decode_share: Annotated[float, about("Share of compute time for decoding during updates.", ge=0.05, le=0.95)] = 0.5
    kv_policy: Annotated[KvPolicy, about("KV cache at a weight swap: keep, recompute, or drain sequences.")] = "keep"


class RolloutsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far rollouts run ahead of the learner."""

    max_batches_ahead: Annotated[Positive, about("Limit of batches in progress beyond the batch in training.")] = 2


class QueuesSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capacities of the queues between actors; a full queue blocks its sender."""

    prompts: Annotated[Positive, about("Capacity of the queue from the prompter to the generator.")] = 16
    rollouts: Annotated[Positive, about("Capacity of the queue from the generator to the scorer.")] = 16
    scored: Annotated[Positive, about("Capacity of the queue of scored groups to the learner.")] = 16
    reports: Annotated[Positive, about("Capacity of the queues of step reports from the learner.")] = 4


class ActorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An actor of your own."""

    name: Annotated[str, about("Name of the custom actor in logs, errors and statistics.", min_length=1)]
    factory: Annotated[ModuleName, about("Class of the custom actor, as module:Class.")]
    mode: Annotated[Mode, about("Position: replace actor `at`, insert into or tap queue `at`, or add without queues.")]
    at: Annotated[str, about("Actor that is replaced, or queue that is tapped or inserted into.")] = ""
    restart: Annotated[Restart | None, about("Restart policy, as in Erlang/OTP; none: depends on the position.")] = None
    options: Annotated[dict[str, Any], about("Keyword arguments for the custom actor's class.")] = {}

    @property
    def is_in_group_flow(self) -> bool:
        """Whether groups pass through the actor, so that its failure ends the run; false for a monitor."""
        return self.mode == "insert" or (self.mode == "replace" and self.at != "monitor")


class MonitorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output of the run."""

    display: Annotated[Display, about("Terminal output; auto: live on a terminal, plain lines elsewhere.")] = "auto"
    rollouts: Annotated[bool, about("Write every rollout to rollouts.jsonl.")] = True
    watchdog_seconds: Annotated[PositiveFloat, about("Time until a stalled compute thread is reported.")] = 120.0
    cache_limit_mb: Annotated[Positive, about("Limit of MLX's cache of freed buffers, in MiB.")] = 512


class AtroposSource(Variant, frozen=True, kw_only=True):
    """Groups come through the Atropos API instead of data.train; evaluation does not change."""

    max_tokens: Annotated[int, about("Longer sequences of environments are refused.", ge=2)] = 2048
    poll_seconds: Annotated[float, about("Longest pause between two requests.", ge=0.05, le=60.0)] = 1.0
    patience_seconds: Annotated[PositiveFloat, about("Time without groups until a warning names environments.")] = 60.0


class EnvironmentSource(AtroposSource, frozen=True, kw_only=True):
    """Groups come from environments."""

    python: Interpreter = ""
    missing_logprobs: Annotated[Missing, about("Recompute missing log-probabilities, or refuse the group.")] = "refuse"


class StartedServer(EnvironmentSource, frozen=True, kw_only=True, tag="start"):
    """The run starts an Atropos API server and the [[environments]]."""

    python: Interpreter


class RunningServer(EnvironmentSource, frozen=True, kw_only=True, tag="connect"):
    """The run connects to an Atropos API server that is already running."""

    url: Annotated[str, about("Address of the API server.", pattern=r"^https?://[^\s/]+\S*$", title="http://HOST:PORT")]
    reset: Annotated[bool, about("Clear the server's state of another trainer; false resumes it.")] = True


class MockSource(AtroposSource, frozen=True, kw_only=True, tag="mock"):
    """The run itself makes groups from data.train and [[rewards]] over the HTTP API, without atroposlib."""


AtroposSection = Annotated[
    Off | StartedServer | RunningServer | MockSource, about("Source of groups: data.train or an API server.")
]


class EnvironmentSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One Atropos environment, whose process is started and supervised by the run."""

    name: Annotated[EnvironmentName, about("Name of the environment in logs and metrics.")]
    script: Annotated[str, about("Python file of the environment, run with serve.", min_length=1)]
    weight: Annotated[PositiveFloat, about("Relative share of the environment in every batch.")] = 1.0
    group_size: Annotated[GroupSize | None, about("Completions per prompt here; none: sampling.group_size.")] = None
    min_batch_allocation: Annotated[
        PositiveFraction | None, about("Minimum fraction of every batch; none: in proportion to the weight.")
    ] = None
    options: Annotated[dict[str, Any], about("Flags of the script, as --env.KEY, or --KEY if KEY has a dot.")] = {}
