"""The settings of the command `serve`: tables of a profile that concern a server, its own flags, and its help text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated

from msgspec import Struct

from clotho.settings.bounds import about
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.keys import Keys
from clotho.settings.layers import COMMAND_LINE, Layer
from clotho.settings.model import ModelSection, PolicySection
from clotho.settings.server import HttpServer
from protocols.errors import ProfileError, did_you_mean, visible
from training_run.attachment import weights_are_replaced
from training_run.profile.flags import WIDTH, help_topic, key_help, parse_flags
from training_run.profile.keys import SETTABLE, flag_of
from training_run.profile.load import decode_tables, file_layers, flatten, located, merge, profile_path
from training_run.profile.mounted import unused_by
from training_run.profile.program import program
from training_run.profile.schema import MemorySection, MonitorSection

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
"""What the name of an adapter may be."""


class ServingProfile(Struct, frozen=True, kw_only=True):
    """The settings of a standalone server: the tables of a profile that apply to it.

    policy: the trainable parameters of the training run whose weights the server accepts.
    """

    model: ModelSection
    policy: PolicySection
    sampling: SamplingSection
    server: HttpServer
    engine: EngineSection
    memory: MemorySection
    monitor: MonitorSection


class ServeFlags(Struct, frozen=True, kw_only=True):
    """The flags of `serve` that are not keys of a profile."""

    profile: Annotated[str, about("Profile whose model and server settings apply: a name or a .toml file.")] = ""
    adapter: Annotated[
        tuple[str, ...], about("An adapter to serve, as NAME=PATH; repeat it for further adapters.")
    ] = ()


class ServeArguments(Struct, frozen=True, kw_only=True):
    """A parsed command line of `serve`. adapters: path of each adapter by name.

    model_name: the name that the command line or the profile gives to the model; empty: its path.
    """

    profile: ServingProfile
    adapters: dict[str, Path]
    model_name: str = ""


OWN = {name: key for name, key in Keys(ServeFlags).settable.items() if key.help}

NOT_SERVED = frozenset({
    "sampling.group_size", "sampling.top_logprobs", "server.type", "server.dashboard",
    "engine.kv_policy", "monitor.display", "monitor.rollouts", "policy.grad_checkpoint",
    "policy.adapter",
})  # fmt: skip
"""Keys of the tables of `ServingProfile` that concern training only."""

APPLICABLE = {
    path: key
    for path, key in SETTABLE.items()
    if path.partition(".")[0] in ServingProfile.__struct_fields__ and path not in NOT_SERVED | unused_by("serve")
}
"""The keys that apply to a standalone server, by path."""

COMMON = (
    "model.path", "model.dtype", "server.host", "server.port", "server.api_key", "server.model_name",
    "sampling.max_tokens", "sampling.temperature", "engine.max_num_seqs", "engine.kv_cache_tokens",
)  # fmt: skip
USAGE = f"usage: {program()} serve --model M [--adapter NAME=PATH ...] [--KEY VALUE ...]"


def serve_help(argv: Sequence[str]) -> str | None:
    """The help text that a command line of `serve` requests; None if it requests none. Raises ProfileError."""
    topic = help_topic(argv)
    if topic is None:
        return None
    found = [key for path, key in APPLICABLE.items() if topic == "all" or f"{path}.".startswith(f"{topic}.")]
    if topic and not found:
        hint = did_you_mean(topic, list(APPLICABLE))
        raise ProfileError(f"--help {visible(topic, 60)}: `serve` has no section or key of this name{hint}")
    own = [USAGE, *map(key_help, OWN.values())] if topic in ("", "all") else []
    listed = found if topic else [APPLICABLE[path] for path in COMMON]
    tables = ", ".join(ServingProfile.__struct_fields__)
    more = f"--help-all shows every flag, --help SECTION the flags of one section: {tables}."
    return "\n".join([*own, *map(key_help, listed), *([] if topic else [fill(more, WIDTH)])]) + "\n"


def load_serving(argv: Sequence[str]) -> ServeArguments:
    """Read a command line of `serve`, without the word `serve`.

    Flags must apply to a server. A profile may describe a training run: its settings for training are not used.
    Raises ProfileError.
    """
    values = parse_flags(argv, OWN, "serve")
    own = ServeFlags(**{name: values.pop(name) for name in OWN if name in values})
    if unused := [path for path in values if path not in APPLICABLE]:
        raise ProfileError(f"{flag_of(unused[0])} is a setting of training runs, which serve ignores: see serve --help")
    flags = located(flatten(values, COMMAND_LINE), Path.cwd(), COMMAND_LINE)
    layers = file_layers(profile_path(own.profile)) if own.profile else []
    used = [Layer(label=layer.label, values=_applicable(layer.values)) for layer in layers]
    merged = merge([*used, Layer(label=COMMAND_LINE, values=flags)])
    if "model.path" not in merged.values:
        raise ProfileError("serve needs a model: --model DIRECTORY, FILE.gguf, package:NAME/FILE or a hub repository")
    profile = decode_tables(merged, ServingProfile)
    replaced = weights_are_replaced(profile.server)
    if not replaced and (unused := [path for path in values if path.startswith("policy.")]):
        raise ProfileError(f"{flag_of(unused[0])} has no effect without --server.accept-weights true")
    limit = profile.engine.kv_cache_tokens
    if profile.sampling.max_tokens >= limit:
        raise ProfileError(
            f"sampling.max_tokens = {profile.sampling.max_tokens} must be less than engine.kv_cache_tokens = {limit}"
        )
    named = profile.server.model_name if "server.model_name" in merged.values else ""
    return ServeArguments(profile=profile, adapters=_adapters(own.adapter), model_name=named)


def _applicable(values: dict[str, object]) -> dict[str, object]:
    return {path: value for path, value in values.items() if path in APPLICABLE}


def _adapters(given: Sequence[str]) -> dict[str, Path]:
    """Read `NAME=PATH` pairs. Raises ProfileError."""
    found: dict[str, Path] = {}
    for pair in given:
        name, equals, path = pair.partition("=")
        if not equals or not path or not NAME.fullmatch(name):
            allowed = "NAME=PATH with a name of letters, digits and . _ : / -"
            raise ProfileError(f"--adapter must be {allowed}, not {visible(pair, 200)!r}")
        if name in found:
            raise ProfileError(f"--adapter: the name {name} is given twice")
        found[name] = Path(path).expanduser()
    return found
