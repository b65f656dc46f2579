"""What `tinker` adds to the library: the routes of Tinker's API, if the server has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attachments.tinker.sections import TINKER, TinkerApi
from protocols.errors import ProfileError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from clotho.serving.parts import Endpoint, Handlers, ServerParts

HERE, PREFIX = "attachments.tinker", "/api/v1"

CONSTANT = {
    ("GET", "healthz"): b'{"status":"ok"}',
    ("POST", "telemetry"): b'{"status":"accepted"}',
    ("POST", "client/dynamic_config"): b'{"sample_cancel_enabled":true,"refresh_interval_sec":300}',
}
"""Routes with one answer."""
PROMISED = (
    "asample", "create_model", "load_weights", "optim_step", "save_weights", "save_weights_for_sampler", "unload_model",
)  # fmt: skip
"""POST routes that begin work, whose result `retrieve_future` returns."""
TRAINING = {
    "client/config": "config", "create_session": "create_session", "session_heartbeat": "heartbeat",
    "sessions/{session_id}/finish": "finish", "get_info": "get_info", "forward_backward": "forward_backward",
    "create_sampling_session": "create_sampling_session", "retrieve_future": "retrieve", "cancel_future": "cancel",
}  # fmt: skip
"""POST routes below the prefix, with the methods of `TinkerRoutes` that answer them."""

CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"
REST = (
    ("GET", "training_runs", "runs"), ("GET", "training_runs/{run_id}", "run"),
    ("GET", "training_runs/{run_id}/checkpoints", "checkpoints_of_run"), ("GET", "checkpoints", "checkpoints"),
    ("DELETE", CHECKPOINT, "delete"), ("PUT", f"{CHECKPOINT}/ttl", "set_ttl"),
    ("GET", f"{CHECKPOINT}/archive", "archive"), ("POST", "weights_info", "weights_info"),
    ("POST", "copy_weights", "copy"), ("GET", "sessions", "sessions"), ("GET", "sessions/{session_id}", "session"),
)  # fmt: skip

REFUSED = (
    ("POST", "save_weights_external", "External weights are not served: save_weights_for_sampler writes an adapter of "
     "mlx-lm, which `clotho convert` turns into one of PEFT."),
    ("POST", "create_custom_loss", "Losses run in the client: use forward_backward_custom with a function."),
    ("POST", f"{CHECKPOINT}/publish", "Checkpoints are not published: they are files below server.tinker.directory."),
    ("DELETE", f"{CHECKPOINT}/publish", "Checkpoints are not published."),
    ("GET", f"{CHECKPOINT}/external_weights_urls", "External weights are not served."),
    ("PUT", "sessions/{session_id}/project", "There are no projects: API keys separate what belongs to whom."),
    ("GET", "sessions/{session_id}/trace_export", "Traces are not served."),
    ("POST", "sessions/search", "Sessions are not searched; list_sessions lists those that are open."),
)  # fmt: skip
"""Routes of Tinker that are refused by name."""


def server(parts: ServerParts) -> None:
    """Add the routes, if the setting says so and this server has a base model. Raises ProfileError."""
    settings = TINKER.of(parts.offered.settings)
    if not isinstance(settings, TinkerApi):
        return
    if find_spec("google.protobuf") is None:
        raise ProfileError('server.tinker needs protobuf: pip install "clotho-mlx[tinker]"')
    if (access := parts.offered.base) is None:
        raise ProfileError("server.tinker trains adapters of a base model: it excludes server.accept_weights")
    from clotho.serving.parts import Handlers

    training = Handlers(f"{HERE}.routes:TinkerRoutes", parts, access, settings)
    parts.endpoints += _endpoints(parts, training)
    parts.gauges.append(partial(_measured, training))


def _measured(training: Handlers) -> Iterable[Metric]:
    """Return metrics once a client has asked for anything."""
    if not training.is_loaded:
        return ()
    from attachments.tinker.service import tinker_metrics

    return tinker_metrics(training.loaded.service)


def _endpoints(parts: ServerParts, training: Handlers) -> Iterator[Endpoint]:
    """Return the routes. training: those that hold the state of the API."""
    from clotho.serving.parts import Endpoint, Handlers

    rest = Handlers(f"{HERE}.routes_rest:RestRoutes", parts, training)

    def endpoint(method: Any, path: str, handle: Any) -> Endpoint:
        return Endpoint(method, f"{PREFIX}/{path}", handle, admitted=False)

    for path, name in TRAINING.items():
        yield endpoint("POST", path, training.method(name))
    for path in PROMISED:
        yield endpoint("POST", path, training.method("promised", route=path))
    for (method, path), content in CONSTANT.items():
        yield endpoint(method, path, training.method("constant", content=content))
    yield endpoint("POST", "forward", training.method("forward_backward", forward_only=True))
    yield endpoint("GET", "get_server_capabilities", training.method("capabilities"))
    yield endpoint("GET", "samplers/{sampler_id}", training.method("sampler"))
    for method, path, name in REST:
        yield endpoint(method, path, rest.method(name))
    for method, path, advice in REFUSED:
        yield endpoint(method, path, training.method("refused", advice=advice))
