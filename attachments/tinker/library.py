"""What `tinker` adds to the library: the routes of Tinker's API, if the server has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from attachments.tinker.sections import TINKER, TinkerApi
from protocols.errors import ProfileError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from clotho.serving.parts import Handler, Handlers, ServerParts

PREFIX = "/api/v1/"
TENANTS = f"{PREFIX}tenants"

CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"

CONSTANT: Mapping[str, Mapping[str, object]] = {
    "GET healthz": {"status": "ok"},
    "POST telemetry": {"status": "accepted"},
    "POST client/dynamic_config": {"sample_cancel_enabled": True, "refresh_interval_sec": 300},
}
"""Routes with one answer."""

SERVICE = (
    "create_session", "session_heartbeat", "get_info", "create_sampling_session", "cancel_future",
)  # fmt: skip
PROMISED = (
    "asample", "create_model", "load_weights", "optim_step", "save_weights", "save_weights_for_sampler", "unload_model",
)  # fmt: skip
"""POST routes, with the names of methods of the service; those that promise a result count in quotas."""

NAMED = {
    "POST client/config": "service.config", "GET get_server_capabilities": "service.get_server_capabilities",
    "POST sessions/{session_id}/finish": "service.finish", "GET samplers/{sampler_id}": "service.sampler",
    "GET training_runs": "rest.runs", "GET training_runs/{run_id}": "rest.run", "GET sessions": "rest.sessions",
    "GET training_runs/{run_id}/checkpoints": "rest.checkpoints_of_run", "GET checkpoints": "rest.checkpoints",
    f"DELETE {CHECKPOINT}": "rest.delete", f"PUT {CHECKPOINT}/ttl": "rest.set_ttl",
    "POST weights_info": "rest.weights_info", "POST copy_weights": "rest.copy_weights",
    "GET sessions/{session_id}": "rest.session",
}  # fmt: skip
"""Other routes, with the methods that answer them."""

REFUSED = {
    "POST save_weights_external": "External weights are not served: save_weights_for_sampler writes an adapter of "
    "mlx-lm, which `clotho convert` turns into one of PEFT.",
    "POST create_custom_loss": "Losses run in the client: use forward_backward_custom with a function.",
    f"POST {CHECKPOINT}/publish": "Checkpoints are not published: they are files below server.tinker.directory.",
    f"DELETE {CHECKPOINT}/publish": "Checkpoints are not published.",
    f"GET {CHECKPOINT}/external_weights_urls": "External weights are not served.",
    "PUT sessions/{session_id}/project": "There are no projects: API keys separate what belongs to whom.",
    "GET sessions/{session_id}/trace_export": "Traces are not served.",
    "POST sessions/search": "Sessions are not searched; list_sessions lists those that are open.",
}
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
    from starlette.responses import RedirectResponse
    from starlette.routing import Route

    from clotho.serving.parts import Endpoint, Handlers

    routes = Handlers("attachments.tinker.routes:TinkerRoutes", parts, access, settings)
    own = [Endpoint("GET", TENANTS, routes.method("tenants"), admitted=False, access="admin")]
    for route, handle in _handlers(routes):
        method, path = route.split()
        own.append(Endpoint(cast(Any, method), PREFIX + path, handle, admitted=False))
    parts.endpoints[:0] = own
    parts.gauges.append(partial(_measured, routes))
    if parts.offered.settings.dashboard:
        parts.pages.append(lambda _: [Route("/", RedirectResponse(TENANTS))])


def _measured(routes: Handlers) -> Iterable[Metric]:
    """Return metrics once a client has asked for anything."""
    if not routes.is_loaded:
        return ()
    from attachments.tinker.service import tinker_metrics

    return tinker_metrics(routes.loaded.service)


def _handlers(routes: Handlers) -> Iterator[tuple[str, Handler]]:
    """Yield each route and what answers it; what is asked most comes first, because routes are tried in order."""
    yield "POST retrieve_future", routes.method("retrieve_future")
    for name in (*PROMISED, *SERVICE):
        yield f"POST {name}", routes.method("call", by=f"service.{name}", counts=name in PROMISED)
    yield "POST forward_backward", routes.method("forward_backward")
    yield "POST forward", routes.method("forward_backward", forward_only=True)
    for route, by in NAMED.items():
        yield route, routes.method("call", by=by)
    for route, found in CONSTANT.items():
        yield route, routes.method("constant", found=found)
    for route, advice in REFUSED.items():
        yield route, routes.method("refused", advice=advice)
    yield f"GET {CHECKPOINT}/archive", routes.method("archive")
