"""Run <-> rollout worker: settings of a worker, the requests of one turn, and what becomes of a request."""

from __future__ import annotations

from msgspec import Struct

from clotho.config.schema import EngineSection, ModelSection, MonitorSection, PolicySection, SamplingSection
from protocols.remote import RolloutAnswer, RolloutCall
from protocols.step import WeightsReady

RESOURCE = "mlx"
"""Custom resource of Ray: one unit is one device that decodes."""


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """Run -> worker: the sections of the profile that a decode engine needs. seed: of the run."""

    model: ModelSection
    policy: PolicySection
    sampling: SamplingSection
    engine: EngineSection
    monitor: MonitorSection
    seed: int


class Turn(Struct, frozen=True, kw_only=True):
    """Run -> worker: requests that enter the engine in one turn, so that batches do not depend on timing."""

    calls: tuple[RolloutCall, ...]


class Published(Struct, frozen=True, kw_only=True):
    """Run -> worker: the description of weights in the object store, whose contents are further arguments.

    run_id: of the run. patched: the contents are patches of the weights that the worker serves, the oldest first;
    otherwise the content is one safetensors file.
    """

    ready: WeightsReady
    run_id: str
    patched: bool


class Sampled(Struct, frozen=True, kw_only=True, tag="sampled"):
    """Worker -> run: the completions of a request."""

    answer: RolloutAnswer


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """Worker -> run: the engine refuses a request. param: the field that is not valid."""

    message: str
    param: str


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """Worker -> run: the engine cannot finish a request, or the request is not known."""

    reason: str


Outcome = Sampled | Refused | Failed
