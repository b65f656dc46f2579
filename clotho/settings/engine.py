"""Settings of sampling and of the decode engine."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from clotho.settings.bounds import NonNegative, Positive, about
from protocols.sampling import Sampling


class SamplingSection(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of the rollouts."""

    group_size: Annotated[int, about("Number of completions per prompt.", ge=1, le=4096)] = 8


KvPolicy = Literal["keep", "recompute", "drain"]


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decode engine."""

    max_num_seqs: Annotated[Positive, about("Maximum number of sequences that are decoded at once.")] = 256
    kv_cache_tokens: Annotated[Positive, about("Tokens of all running sequences in the KV cache.")] = 262_144
    prefix_cache_tokens: Annotated[NonNegative, about("Capacity of the prefix cache, in tokens.")] = 16_384
    prefill_chunk: Annotated[Positive, about("Maximum number of prompt tokens per prefill step.")] = 2048
    decode_share: Annotated[float, about("Share of compute time for decoding during updates.", ge=0.05, le=0.95)] = 0.5
    rollout_share: Annotated[
        float, about("Share of rows and KV cache that clients leave to waiting rollouts.", ge=0, le=1)
    ] = 0.5
    kv_policy: Annotated[KvPolicy, about("KV cache at a weight swap: keep, recompute, or drain sequences.")] = "keep"
