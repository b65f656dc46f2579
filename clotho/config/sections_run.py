"""Sections of a profile that say how the run goes: weights, checkpoints, measurements, server, engine, actors.

A section's docstring has one line per key (`key: text`, or `key, key: text`); `--help` and `docs/configuration.md`
are generated from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clotho.config.bounds import NonNegative, Positive, PositiveFloat

KvPolicy = Literal["keep", "recompute", "drain"]


class ParitySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[parity] Comparison of the sampler's log-probabilities with the learner's.

    tokens: tokens compared between sampler and learner at the start and after every swap; 0 = never.
    warn_nats: a difference in nats that is reported.
    stop_nats: a difference in nats that ends the run.
    """

    tokens: NonNegative = 4
    warn_nats: PositiveFloat = 0.05
    stop_nats: PositiveFloat = 0.5


class CheckpointSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[checkpoint] Snapshots of the whole run.

    interval: steps between them; 0 = only at the end.
    keep_last: how many stay on disk.
    adapter_path: also write the final adapter here; empty = only RUN_DIR/adapters.
    """

    interval: NonNegative = 10
    keep_last: Positive = 3
    adapter_path: str = ""


class EvalSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[eval] Greedy accuracy on held-out problems, on pinned weights: before, after, and in between.

    enabled: measure at all.
    interval: steps between measurements; 0 = only before and after.
    problems: how many; 0 = all.
    problems_between: how many in between; 0 = as many as `problems`.
    """

    enabled: bool = True
    interval: NonNegative = 0
    problems: NonNegative = 0
    problems_between: NonNegative = 0


class ServerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[server] The OpenAI-compatible HTTP server.

    enabled: serve at all.
    host: address to bind.
    port: 0 = any free one.
    api_key: required of every client if set; required to bind beyond the loopback.
    model_name: what /v1/models calls the policy.
    max_concurrent: requests answered at once; those beyond wait in line.
    max_choices: the most completions of one request, prompts times `n`.
    max_body_bytes, body_seconds: limit on a request's body.
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


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[engine] The decode engine.

    max_num_seqs: sequences decoded at once.
    kv_cache_tokens: bound of all their key-value caches, in tokens.
    prefix_cache_tokens: bound of the cache of computed prompts.
    prefill_chunk: prompt tokens per tick.
    decode_share: part of the compute thread's time given to decoding while the learner has work.
    kv_policy: what becomes of the caches of running sequences: `keep`, `recompute`, or `drain` (finish them first).
    """

    max_num_seqs: Positive = 256
    kv_cache_tokens: Positive = 262_144
    prefix_cache_tokens: NonNegative = 16_384
    prefill_chunk: Positive = 2048
    decode_share: Annotated[float, Meta(ge=0.05, le=0.95)] = 0.5
    kv_policy: KvPolicy = "keep"


class RolloutsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[rollouts] How far rollouts run ahead of the learner.

    max_batches_ahead: batches that may be in flight beyond the one being learned; `async = false` makes it 0.
    """

    max_batches_ahead: Positive = 2


class QueuesSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[queues] Capacities of the arrows, in messages.

    prompts, rollouts, scored, reports: messages that wait before the producer does.
    """

    prompts: Positive = 16
    rollouts: Positive = 16
    scored: Positive = 16
    reports: Positive = 4


class ActorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[actors]] An actor of your own; docs/actors.md shows each mode.

    name: in logs, errors and statistics.
    factory: `module:Class`.
    mode: `replace` the box named in `at`; `insert` on, or `tap`, the arrow named in `at`; `add` a free-standing one.
    at: a box or an arrow.
    restart: as in OTP; unless set, `transient` where others wait for it (replace, insert), else `temporary`.
    options: handed to the factory as keyword arguments.
    """

    name: Annotated[str, Meta(min_length=1)]
    factory: Annotated[str, Meta(pattern=r"^[\w.]+:\w+$", description="module:name")]
    mode: Literal["replace", "insert", "tap", "add"]
    at: str = ""
    restart: Literal["permanent", "transient", "temporary"] | None = None
    options: dict[str, Any] = {}

    @property
    def stands_on_the_flow(self) -> bool:
        """Whether groups pass through it, so that its failure is the run's; the monitor only looks on."""
        return self.mode == "insert" or (self.mode == "replace" and self.at != "monitor")


class MonitorSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[monitor] What is shown and written while the run goes on.

    display: `auto` is live on a terminal and plain lines elsewhere.
    rollouts: write rollouts.jsonl.
    watchdog_seconds: a compute thread that does not move for so long is reported, also on /health.
    cache_limit_mb: MLX's cache of freed buffers.
    """

    display: Literal["auto", "live", "plain", "none"] = "auto"
    rollouts: bool = True
    watchdog_seconds: PositiveFloat = 120.0
    cache_limit_mb: Positive = 512
