"""What /metrics shows of the programs that train and sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from attachments.tinker.service import TinkerService
from clotho.serving.metrics import gauge, gauges
from protocols.errors import visible


def tinker_metrics(service: TinkerService) -> Iterator[Metric]:
    """Yield gauges of open sessions, which are labels only while they are open."""
    sessions = service.sessions.open("")
    models = {model.model_id: model for one in sessions for model in one.models.values()}
    versions = Counter(visible(one.fields.sdk_version, 20) for one in sessions)
    yield gauges("clotho_tinker_sessions", "Open sessions by version of the SDK.", versions, by="sdk")
    unfinished = {one.session_id: one.unfinished for one in sessions}
    yield gauges("clotho_tinker_requests", "Requests of a session without a result.", unfinished, by="session")
    steps = {name: model.steps for name, model in models.items()}
    yield gauges("clotho_tinker_steps", "Optimizer steps of a model in training.", steps, by="model")
    size = sum(model.bytes for model in models.values())
    yield gauge("clotho_tinker_model_bytes", "Estimated memory of the models in training.", size)
    yield gauge("clotho_tinker_budget_bytes", "Memory that models in training may take.", service.budget)
    yield gauge("clotho_tinker_adapters", "Adapters in memory that are sampled from.", service.samplers.resident)
    yield gauge("clotho_tinker_learner_queue", "Requests that wait for the learner.", service.queue.waiting)
