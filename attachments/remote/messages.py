"""Trainer <-> remote inference server: the served policy, requests for rollouts, and their completions."""

from __future__ import annotations

from msgspec import Struct

from protocols.sampling import Completion, SampleRequest, Sampling

VERSION_HEADER, STEP_HEADER = "x-clotho-weights-version", "x-clotho-weights-step"
FINGERPRINT_HEADER, RUN_HEADER = "x-clotho-weights-fingerprint", "x-clotho-run-id"
FILE_HEADER = "x-clotho-weights-file"
"""Headers of a request that sends weights: of the weights, the run that they belong to, and the file that contains
them, if the body does not."""

MAX_LISTED_VERSIONS = 64
"""Number of policy versions whose fingerprints a server and a trainer remember."""


class ServedPolicy(Struct, frozen=True, kw_only=True):
    """Server -> trainer: the policy that the server samples from.

    The response of GET /v1/policy and PUT /v1/policy/weights. version, step, fingerprint: of the served weights.
    run_id: the run that sent the weights; empty if no run did. layout: hash of the names, shapes and types of the
    trainable parameters. vocab_size, context_length: of the model. instance: differs after a restart of the server;
    empty if the server does not say.
    """

    version: int
    step: int
    fingerprint: str
    run_id: str
    layout: str
    vocab_size: int
    context_length: int
    instance: str = ""


class RolloutCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trainer -> server: one completion per seed. The body of POST /v1/rollouts; the fields are `SampleRequest`'s."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seeds: tuple[int, ...]
    record_support: bool = False

    @classmethod
    def of(cls, request: SampleRequest) -> RolloutCall:
        """Return the call for a sampling request, without the keys of a profile beside its sampling parameters."""
        parameters = {name: getattr(request.sampling, name) for name in Sampling.__struct_fields__}
        return cls(
            prompt=request.prompt,
            sampling=Sampling(**parameters),
            seeds=request.seeds,
            record_support=request.record_support,
        )

    def request(self) -> SampleRequest:
        """Return the sampling request."""
        return SampleRequest(
            prompt=self.prompt,
            sampling=self.sampling,
            seeds=self.seeds,
            record_support=self.record_support,
            background=True,
        )


class RolloutAnswer(Struct, frozen=True, kw_only=True):
    """Server -> trainer: one completion per seed, and the fingerprint of each policy version that sampled a token."""

    completions: tuple[Completion, ...]
    fingerprints: dict[int, str]
