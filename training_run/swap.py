"""A swap of the served weights in the decode thread."""

from __future__ import annotations

from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import ComputeThread, finish
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from clotho.settings.engine import KvPolicy
from protocols.step import WeightsReady


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
