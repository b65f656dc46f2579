"""Which methods of the Tinker SDK this server answers: every public method is called, and the answer is noted.

    python -m attachments.tinker.tests.methods http://127.0.0.1:8000

prints the rows of docs/tinker.md for the SDK that is installed. Methods that end in `_async` are the same requests.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["TINKER_PROJECT_ID"] = "default"

TOKENS = [3, 9, 12, 7, 20, 5]

ANSWERED_BY_THE_CLIENT = "answered by the SDK itself"
NO_ACCOUNTS = "not served: accounts, bills and audits of a cloud"
EXCLUDED = {
    "ServiceClient.get_console_url": ANSWERED_BY_THE_CLIENT,
    "ServiceClient.get_telemetry": ANSWERED_BY_THE_CLIENT,
    "TrainingClient.get_console_url": ANSWERED_BY_THE_CLIENT,
    "TrainingClient.get_telemetry": ANSWERED_BY_THE_CLIENT,
    "SamplingClient.create": "of `create_sampling_client`",
    "SamplingClient.get_telemetry": ANSWERED_BY_THE_CLIENT,
    "SamplingClient.on_queue_state_change": ANSWERED_BY_THE_CLIENT,
    "RestClient.get_telemetry": ANSWERED_BY_THE_CLIENT,
    "RestClient.get_audit_log": NO_ACCOUNTS,
    "RestClient.get_billing_usage": NO_ACCOUNTS,
    "RestClient.get_current_checkpoint_storage_usage": NO_ACCOUNTS,
    "RestClient.whoami": "needs a token of Tinker's accounts, which the SDK reads itself",
    "TrainingClient.forward_backward_custom": "served by `forward` and `forward_backward`; needs PyTorch in the client",
    "ServiceClient.create_custom_loss": "for `forward_backward_custom`; needs PyTorch in the client",
}
"""Methods that are not called, with the reason."""


class Clients(NamedTuple):
    """The clients of one session, and what it has saved."""

    service: Any
    training: Any
    sampling: Any
    rest: Any
    state: str
    weights: str
    model: str


Call = Callable[[Clients], Any]


def settled(value: Any) -> Any:
    """Return what a method returns, or what its future gets."""
    return value.result() if hasattr(value, "result") else value


def data() -> list[Any]:
    """Return one sequence with weights."""
    from tinker import types

    inputs = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    return [types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)]


def prompt() -> Any:
    """Return the beginning of the sequence."""
    from tinker import types

    return types.ModelInput.from_ints(TOKENS[:3])


def run_of(c: Clients) -> str:
    """Return the training run of the first model."""
    return c.state.split("/")[2]


def removable(c: Clients, name: str) -> str:
    """Return the path of a checkpoint that may be deleted."""
    return str(settled(c.training.save_state(name)).path)


def service_calls() -> Mapping[str, Call]:
    """Return a call of each method of ServiceClient that is not excluded."""
    return {
        "ServiceClient.get_server_capabilities": lambda c: c.service.get_server_capabilities(),
        "ServiceClient.create_lora_training_client": lambda c: c.service.create_lora_training_client(c.model, rank=2),
        "ServiceClient.create_training_client_from_state": lambda c: c.service.create_training_client_from_state(
            c.state
        ),
        "ServiceClient.create_training_client_from_state_with_optimizer": (
            lambda c: c.service.create_training_client_from_state_with_optimizer(c.state)
        ),
        "ServiceClient.create_sampling_client": lambda c: c.service.create_sampling_client(model_path=c.weights),
        "ServiceClient.create_rest_client": lambda c: c.service.create_rest_client(),
        "ServiceClient.copy_weights": lambda c: c.service.copy_weights(c.state),
        "ServiceClient.close": lambda c: c.service.close("success"),
    }


def training_calls() -> Mapping[str, Call]:
    """Return a call of each method of TrainingClient that is not excluded."""
    from tinker import types

    adam = types.AdamParams(learning_rate=1e-3)
    return {
        "TrainingClient.forward": lambda c: c.training.forward(data(), "cross_entropy"),
        "TrainingClient.forward_backward": lambda c: c.training.forward_backward(data(), "cross_entropy"),
        "TrainingClient.optim_step": lambda c: c.training.optim_step(adam),
        "TrainingClient.save_state": lambda c: c.training.save_state("again"),
        "TrainingClient.load_state": lambda c: c.training.load_state(c.state),
        "TrainingClient.load_state_with_optimizer": lambda c: c.training.load_state_with_optimizer(c.state),
        "TrainingClient.save_weights_for_sampler": lambda c: c.training.save_weights_for_sampler("other"),
        "TrainingClient.save_weights_and_get_sampling_client": (
            lambda c: c.training.save_weights_and_get_sampling_client()
        ),
        "TrainingClient.create_sampling_client": lambda c: c.training.create_sampling_client(c.weights),
        "TrainingClient.save_weights_external": lambda c: c.training.save_weights_external("external"),
        "TrainingClient.get_info": lambda c: c.training.get_info(),
        "TrainingClient.get_tokenizer": lambda c: c.training.get_tokenizer(),
    }


def sampling_calls() -> Mapping[str, Call]:
    """Return a call of each method of SamplingClient that is not excluded."""
    from tinker import types
    from tinker.lib.public_interfaces.sampling_client import SamplingClient

    params = types.SamplingParams(max_tokens=4)
    return {
        "SamplingClient.sample": lambda c: c.sampling.sample(prompt(), 2, params, include_prompt_logprobs=True),
        "SamplingClient.compute_logprobs": lambda c: c.sampling.compute_logprobs(prompt()),
        "SamplingClient.get_base_model": lambda c: c.sampling.get_base_model(),
        "SamplingClient.get_tokenizer": lambda c: c.sampling.get_tokenizer(),
        "SamplingClient.get_sampler_handle": lambda c: c.sampling.get_sampler_handle(),
        "SamplingClient.from_sampler_handle": (
            lambda c: SamplingClient.from_sampler_handle(c.sampling.get_sampler_handle(), api_key="tml-x").sample(
                prompt(), 1, params
            )
        ),
    }


def rest_calls() -> Mapping[str, Call]:
    """Return a call of each method of RestClient that is not excluded."""
    return {
        "RestClient.get_server_capabilities": lambda c: c.rest.get_server_capabilities(),
        "RestClient.get_training_run": lambda c: c.rest.get_training_run(run_of(c)),
        "RestClient.get_training_run_by_tinker_path": lambda c: c.rest.get_training_run_by_tinker_path(c.state),
        "RestClient.get_weights_info_by_tinker_path": lambda c: c.rest.get_weights_info_by_tinker_path(c.state),
        "RestClient.list_training_runs": lambda c: c.rest.list_training_runs(),
        "RestClient.list_checkpoints": lambda c: c.rest.list_checkpoints(run_of(c)),
        "RestClient.list_user_checkpoints": lambda c: c.rest.list_user_checkpoints(),
        "RestClient.delete_checkpoint": (
            lambda c: removable(c, "one") and c.rest.delete_checkpoint(run_of(c), "weights/one")
        ),
        "RestClient.delete_checkpoint_from_tinker_path": (
            lambda c: c.rest.delete_checkpoint_from_tinker_path(removable(c, "two"))
        ),
        "RestClient.set_checkpoint_ttl_from_tinker_path": (
            lambda c: c.rest.set_checkpoint_ttl_from_tinker_path(c.state, 7200)
        ),
        "RestClient.copy_weights": lambda c: c.rest.copy_weights(c.state, "default"),
        "RestClient.get_checkpoint_archive_url": (
            lambda c: c.rest.get_checkpoint_archive_url(run_of(c), c.weights.split("/", 3)[3])
        ),
        "RestClient.get_checkpoint_archive_url_from_tinker_path": (
            lambda c: c.rest.get_checkpoint_archive_url_from_tinker_path(c.weights)
        ),
        "RestClient.get_external_weights_urls": lambda c: c.rest.get_external_weights_urls(
            f"tinker://{run_of(c)}/external_weights/x"
        ),
        "RestClient.publish_checkpoint_from_tinker_path": (
            lambda c: c.rest.publish_checkpoint_from_tinker_path(c.state)
        ),
        "RestClient.unpublish_checkpoint_from_tinker_path": (
            lambda c: c.rest.unpublish_checkpoint_from_tinker_path(c.state)
        ),
        "RestClient.get_session": lambda c: c.rest.get_session(c.service.holder.get_session_id()),
        "RestClient.list_sessions": lambda c: c.rest.list_sessions(),
        "RestClient.search_sessions": lambda c: c.rest.search_sessions(_search()),
        "RestClient.assign_session_project": lambda c: c.rest.assign_session_project("s", "p"),
        "RestClient.export_session_trace": lambda c: c.rest.export_session_trace("s"),
        "RestClient.get_sampler": (lambda c: c.rest.get_sampler(c.sampling._sampling_session_id)),
    }


def _search() -> Any:
    from tinker import types

    return types.SessionSearchRequest()


def public_methods() -> Iterator[str]:
    """Yield the methods of the four clients, without those of the same name and `_async`."""
    from tinker.lib.public_interfaces.rest_client import RestClient
    from tinker.lib.public_interfaces.sampling_client import SamplingClient
    from tinker.lib.public_interfaces.service_client import ServiceClient
    from tinker.lib.public_interfaces.training_client import TrainingClient

    for kind in (ServiceClient, TrainingClient, SamplingClient, RestClient):
        for name in dir(kind):
            if not name.startswith("_") and callable(getattr(kind, name)) and not name.endswith("_async"):
                yield f"{kind.__name__}.{name}"


@contextmanager
def clients(url: str) -> Iterator[Clients]:
    """Begin a session with a model of rank 4 that has taken a step."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key="tml-methods")
    model = str(service.get_server_capabilities().supported_models[0].model_name)
    training = settled(service.create_lora_training_client(model, rank=4, seed=1))
    settled(training.forward_backward(data(), "cross_entropy"))
    settled(training.optim_step(types.AdamParams(learning_rate=1e-3)))
    state, weights = settled(training.save_state("first")).path, settled(training.save_weights_for_sampler("now")).path
    sampling = settled(service.create_sampling_client(model_path=weights))
    yield Clients(service, training, sampling, service.create_rest_client(), state, weights, model)


def outcome(call: Call, given: Clients) -> str:
    """Return `served`, or the reason of the refusal."""
    try:
        found = settled(call(given))
    except Exception as error:
        body = getattr(error, "body", None)
        reason = body["error"]["message"] if isinstance(body, dict) and "error" in body else f"{error}"
        return f"refused: {reason}"
    assert not isinstance(found, Future)
    return "served"


def outcomes(url: str) -> dict[str, str]:
    """Call every public method of the installed SDK, the end of the session last."""
    found: dict[str, str] = {}
    known = {**service_calls(), **training_calls(), **sampling_calls(), **rest_calls()}
    with clients(url) as given, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(public_methods(), key=lambda name: name == "ServiceClient.close"):
            found[name] = EXCLUDED[name] if name in EXCLUDED else outcome(known[name], given)
    return found


def rows(found: Mapping[str, str]) -> list[str]:
    """Return the rows of the table."""
    return [f"| `{name}` | {text} |" for name, text in sorted(found.items())]


def main(url: str) -> None:
    """Print the rows for the server at an address."""
    sys.stdout.write("\n".join(rows(outcomes(url))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
