"""The interface of the decode engine: what it samples from, and what it reports."""

from __future__ import annotations

from typing import Protocol

import mlx.nn as nn
from msgspec import Struct

from clotho.models.lora import AdaptedModule
from clotho.models.tokenizer import ChatTokenizer
from protocols.summary import Distribution, SpeculationCounts

MAX_HOLDERS = 4
"""Number of requests that `EngineStats.cache_holders` names at most."""


class EngineStats(Struct, frozen=True, kw_only=True):
    """Current gauges, and counters since the engine was created.

    running_rows, waiting_rows: completions that are decoded, and completions that wait. waiting_clients: clients with
    requests that wait for admission. rows_limit: how many completions are decoded at once at most.
    cache_tokens: tokens that the KV cache of running rows holds memory for. cache_holders: while a row waits because
    the KV cache has no room for it, the requests of clients whose rows are long, the longest first.
    prefix_cache_tokens: tokens in the prefix cache. tokens_sampled: tokens reported, without wasted samples.
    prefill_tokens: prompt tokens computed, with padding.
    prefix_hits, prefix_misses: prompts found and not found in the prefix cache. decode_steps: number of decode steps.
    finished: completions by finish reason. failed: requests that failed. listener_errors: requests that were closed
    because their listener raised. preempted: rows that left the batch and will continue. timed_out: requests that
    exceeded a limit on their time, by limit: `queue` or `answer`. timings: distributions of durations and of the tokens
    of a step. speculation: drafts and their accepted tokens.
    """

    running_rows: int
    waiting_rows: int
    waiting_clients: int
    rows_limit: int
    cache_tokens: int
    cache_holders: tuple[str, ...]
    prefix_cache_tokens: int
    tokens_sampled: int
    prefill_tokens: int
    prefix_hits: int
    prefix_misses: int
    decode_steps: int
    finished: dict[str, int]
    failed: int
    listener_errors: int
    preempted: int
    timed_out: dict[str, int]
    timings: dict[str, Distribution]
    speculation: SpeculationCounts


class ServedModel(Protocol):
    """What the engine samples from: a model, its tokenizer, and the served policy version."""

    @property
    def model(self) -> nn.Module:
        """The model as mlx-lm builds it. Its parameters may be swapped between steps."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Converts tokens to text, and names the tokens that end a completion."""

    @property
    def adapted(self) -> tuple[AdaptedModule, ...]:
        """The modules of `model` that hold the policy's own adapter."""

    @property
    def keeps_base(self) -> bool:
        """Whether training leaves the base weights as they are."""

    @property
    def version(self) -> int:
        """The served policy version."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and completion."""
