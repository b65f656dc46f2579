"""The swap of served weights between two decode steps."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute, ComputeThread, finish
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from clotho.settings.engine import KvPolicy
from protocols.step import WeightsReady


class ServedWeights(Protocol):
    """Announces the weights that are served. Belongs to the event loop."""

    @property
    def value(self) -> WeightsReady:
        """The weights that are served now."""

    def put(self, value: WeightsReady, /) -> None:
        """Announce others."""


class ReplaceablePolicy(Struct, frozen=True, kw_only=True, eq=False):
    """A policy whose weights somebody outside this process replaces."""

    policy: Policy
    engine: DecodeEngine
    compute: Compute
    weights: ServedWeights
    kv_policy: KvPolicy = "keep"


async def swap_weights(
    decode: ComputeThread,
    policy: Policy,
    engine: DecodeEngine,
    kv_policy: KvPolicy,
    parameters: Parameters,
    ready: WeightsReady,
) -> float:
    """Serve `parameters`, which are evaluated, from now on; return the duration of the swap in seconds.

    With the KV policy `drain`, running rows finish first. Raises ValueError if the parameters are not the policy's.
    """

    def publish() -> float:
        return policy.publish(parameters, version=ready.version, step=ready.step, fingerprint=ready.fingerprint)

    return await finish(await finish(decode.submit(lambda: engine.swap(publish, kv_policy))))
