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
os.environ["TINKER_API_KEY"] = "tml-methods"

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


OF = {"ServiceClient": "service", "TrainingClient": "training", "SamplingClient": "sampling", "RestClient": "rest"}
"""The object of `Clients` that has the methods of a class."""


def arguments() -> Mapping[str, Callable[[Clients], tuple[Any, ...]]]:
    """Return the arguments of each method that is called with any."""
    from tinker import types

    params, adam = types.SamplingParams(max_tokens=4), types.AdamParams(learning_rate=1e-3)
    batch = (data(), "cross_entropy")
    state: Callable[[Clients], tuple[Any, ...]] = lambda c: (c.state,)  # noqa: E731
    run: Callable[[Clients], tuple[Any, ...]] = lambda c: (run_of(c),)  # noqa: E731
    return {
        "ServiceClient.create_lora_training_client": lambda c: (c.model, 2),
        "ServiceClient.create_training_client_from_state": state,
        "ServiceClient.create_training_client_from_state_with_optimizer": state,
        "ServiceClient.create_sampling_client": lambda c: (c.weights,),
        "ServiceClient.copy_weights": state,
        "ServiceClient.close": lambda _: ("success",),
        "TrainingClient.forward": lambda _: batch,
        "TrainingClient.forward_backward": lambda _: batch,
        "TrainingClient.optim_step": lambda _: (adam,),
        "TrainingClient.save_state": lambda _: ("again",),
        "TrainingClient.load_state": state,
        "TrainingClient.load_state_with_optimizer": state,
        "TrainingClient.save_weights_for_sampler": lambda _: ("other",),
        "TrainingClient.create_sampling_client": lambda c: (c.weights,),
        "TrainingClient.save_weights_external": lambda _: ("external",),
        "SamplingClient.sample": lambda _: (prompt(), 2, params, True),
        "SamplingClient.compute_logprobs": lambda _: (prompt(),),
        "SamplingClient.from_sampler_handle": lambda c: (c.sampling.get_sampler_handle(),),
        "RestClient.get_training_run": run,
        "RestClient.get_training_run_by_tinker_path": state,
        "RestClient.get_weights_info_by_tinker_path": state,
        "RestClient.list_checkpoints": run,
        "RestClient.delete_checkpoint": lambda c: (removable(c, "one") and run_of(c), "weights/one"),
        "RestClient.delete_checkpoint_from_tinker_path": lambda c: (removable(c, "two"),),
        "RestClient.set_checkpoint_ttl_from_tinker_path": lambda c: (c.state, 7200),
        "RestClient.copy_weights": lambda c: (c.state, "default"),
        "RestClient.get_checkpoint_archive_url": lambda c: (run_of(c), c.weights.split("/", 3)[3]),
        "RestClient.get_checkpoint_archive_url_from_tinker_path": lambda c: (c.weights,),
        "RestClient.get_external_weights_urls": lambda c: (f"tinker://{run_of(c)}/external_weights/x",),
        "RestClient.publish_checkpoint_from_tinker_path": state,
        "RestClient.unpublish_checkpoint_from_tinker_path": state,
        "RestClient.get_session": lambda c: (c.service.holder.get_session_id(),),
        "RestClient.search_sessions": lambda _: (types.SessionSearchRequest(),),
        "RestClient.assign_session_project": lambda _: ("s", "p"),
        "RestClient.export_session_trace": lambda _: ("s",),
        "RestClient.get_sampler": lambda c: (c.sampling._sampling_session_id,),
    }


def call(name: str, given: Clients) -> Any:
    """Call a method, and return what it returns or what its future gets."""
    kind, _, method = name.partition(".")
    known = arguments()
    found = known[name](given) if name in known else ()
    return settled(getattr(getattr(given, OF[kind]), method)(*found))


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

    service = tinker.ServiceClient(base_url=url)
    model = str(service.get_server_capabilities().supported_models[0].model_name)
    training = settled(service.create_lora_training_client(model, rank=4, seed=1))
    settled(training.forward_backward(data(), "cross_entropy"))
    settled(training.optim_step(types.AdamParams(learning_rate=1e-3)))
    state, weights = settled(training.save_state("first")).path, settled(training.save_weights_for_sampler("now")).path
    sampling = settled(service.create_sampling_client(model_path=weights))
    yield Clients(service, training, sampling, service.create_rest_client(), state, weights, model)


def outcome(name: str, given: Clients) -> str:
    """Return `served`, or the reason of the refusal."""
    try:
        found = call(name, given)
    except Exception as error:
        body = getattr(error, "body", None)
        reason = body["error"]["message"] if isinstance(body, dict) and "error" in body else f"{error}"
        return f"refused: {reason}"
    assert not isinstance(found, Future)
    return "served"


def outcomes(url: str) -> dict[str, str]:
    """Call every public method of the installed SDK, the end of the session last."""
    found: dict[str, str] = {}
    with clients(url) as given, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(public_methods(), key=lambda name: name == "ServiceClient.close"):
            found[name] = EXCLUDED[name] if name in EXCLUDED else outcome(name, given)
    return found


def rows(found: Mapping[str, str]) -> list[str]:
    """Return the rows of the table."""
    return [f"| `{name}` | {text} |" for name, text in sorted(found.items())]


def main(url: str) -> None:
    """Print the rows for the server at an address."""
    sys.stdout.write("\n".join(rows(outcomes(url))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
