"""Run <-> worker on the cluster: settings of a worker, its requests, and what becomes of them."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from attachments.remote.messages import RolloutAnswer, RolloutCall
from clotho.rewards.registry import RewardOptions
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.model import ModelSection, PolicySection
from protocols.step import WeightsReady
from training_run.profile.mounted import with_attachments
from training_run.profile.schema import MemorySection
from training_run.rewards.worker import Answer, Failure, Ready, Refused

RESOURCE = "mlx"
"""Custom resource of Ray: one unit is one device that decodes."""


class EngineWorkerSettings(Struct, frozen=True, kw_only=True):
    """Run -> worker: the sections of the profile that a decode engine needs. seed: of the run."""

    model: ModelSection
    policy: PolicySection
    sampling: SamplingSection
    engine: EngineSection
    memory: MemorySection
    seed: int


def worker_settings(content: bytes) -> EngineWorkerSettings:
    """Read what the run has sent, with the settings of attachments in the sections."""
    return msgspec.msgpack.decode(content, type=with_attachments(EngineWorkerSettings))


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


class RequestRefused(Struct, frozen=True, kw_only=True, tag="refused"):
    """Worker -> run: the engine refuses a request. param: the field that is not valid."""

    message: str
    param: str


class RequestFailed(Struct, frozen=True, kw_only=True, tag="failed"):
    """Worker -> run: the engine cannot finish a request, or the request is not known."""

    reason: str


Outcome = Sampled | RequestRefused | RequestFailed


class RewardFunction(Struct, frozen=True, kw_only=True):
    """Run -> reward worker: a function, as in `ProcessFunction`.

    source: content of the Python file `file_name` that contains it; None: the machine of the worker has the module.
    """

    name: str
    options: RewardOptions
    memory_bytes: int
    file_name: str
    source: bytes | None


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    """Reward worker -> run: the process of the function ended, or was ended at a limit."""

    message: str


RewardMessage = Ready | Refused | Answer | Failure | Ended


class RewardReply(Struct, frozen=True, kw_only=True):
    """Reward worker -> run. output: what the function has printed since the last reply."""

    message: RewardMessage
    output: bytes
