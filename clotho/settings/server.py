"""Settings of the HTTP server, and the addresses that only programs of this machine reach."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from msgspec import Struct

from clotho.settings.bounds import Off, Positive, PositiveFloat, Variant, ZeroIsOffFloat, about


class AdaptersSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters that clients may load."""

    root: Annotated[str, about("Directory of adapters that clients may load; empty: clients load none.")] = ""
    max_loaded: Annotated[Positive, about("Adapters that are loaded at once; the least recently used leave.")] = 16
    max_bytes: Annotated[Positive, about("Size of all loaded adapters in float32, in bytes.")] = 1_073_741_824
    max_rank: Annotated[Positive, about("Maximum rank of an adapter.")] = 128


class HttpServer(Variant, frozen=True, kw_only=True, tag="http"):
    """The policy is served over HTTP during the run."""

    host: Annotated[str, about("Address that the HTTP server binds.")] = "127.0.0.1"
    port: Annotated[int, about("Port of the HTTP server; 0 takes any free port.", ge=0, le=65535)] = 8000
    api_key: Annotated[str, about("API key of clients; required unless the host is a loopback address.")] = ""
    model_name: Annotated[str, about("Name of the policy in /v1/models.")] = "policy"
    max_queue_seconds: Annotated[ZeroIsOffFloat, about("Time until a request is admitted; 0: no limit.")] = 1200.0
    max_answer_seconds: Annotated[
        ZeroIsOffFloat, about("Time from the admission in which a request is answered; 0: no limit.")
    ] = 3600.0
    max_concurrent: Annotated[Positive, about("Requests that are processed at once; others wait.")] = 256
    max_choices: Annotated[Positive, about("Maximum completions of a request: prompts times n.")] = 64
    max_body_bytes: Annotated[Positive, about("Maximum size of a request body in bytes.")] = 4_194_304
    body_seconds: Annotated[PositiveFloat, about("Time in which a request body must arrive.")] = 30.0
    send_seconds: Annotated[PositiveFloat, about("Time after which a client that does not read is cut off.")] = 30.0
    adapters: AdaptersSection = AdaptersSection()
    shutdown_seconds: Annotated[PositiveFloat, about("Time in which running requests may finish at the end.")] = 10.0
    dashboard: Annotated[bool, about("Show the run to browsers, on the page at / of the server.")] = True


ServerSection = Annotated[Off | HttpServer, about("OpenAI-compatible HTTP server of the run.")]


def is_loopback(host: str) -> bool:
    """Return True if `host` is `localhost` (in any case) or a loopback IP address, with or without IPv6 brackets."""
    name = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
