"""The settings of the commands `serve` and `eval`: tables of a profile that concern them, own flags, and help texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Struct

from clotho.extension import Door
from clotho.settings.bounds import NonNegative, about
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.keys import Key, Keys
from clotho.settings.model import ModelSection, PolicySection
from clotho.settings.server import HttpServer
from protocols.errors import ProfileError, did_you_mean, visible
from training_run.profile.data import DataSection, RewardSection
from training_run.profile.flags import WIDTH, help_topic, key_help, parse_flags
from training_run.profile.keys import SETTABLE, flag_of
from training_run.profile.load import (
    COMMAND_LINE,
    Layer,
    Merged,
    decode_tables,
    file_layers,
    flatten,
    located,
    merge,
    profile_path,
)
from training_run.profile.mounted import unused_by, used_by
from training_run.profile.program import program
from training_run.profile.schema import MemorySection, MonitorSection

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
"""What the name of an adapter may be."""

Part = Literal["heldout", "train", "all"]


REPLACES_WEIGHTS: Door[[HttpServer], bool] = Door("attachment.replaces_weights")
"""Whether clients of `serve` replace the weights of its model. Raises ProfileError for a contradiction."""


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


class EvaluationProfile(Struct, frozen=True, kw_only=True):
    """The settings of an evaluation: the tables of a profile that apply to it."""

    model: ModelSection
    data: DataSection
    sampling: SamplingSection
    engine: EngineSection
    memory: MemorySection
    rewards: tuple[RewardSection, ...]
    seed: int


class EvaluationFlags(Struct, frozen=True, kw_only=True):
    """The flags of `eval` that are not keys of a profile."""

    profile: Annotated[str, about("Settings to start from: a name or a .toml file, such as RUN_DIR/profile.toml.")] = ""
    adapter: Annotated[tuple[str, ...], about("An adapter to evaluate, as PATH or NAME=PATH; repeat it for more.")] = ()
    base: Annotated[bool, about("Evaluate the base model too.")] = True
    part: Annotated[Part, about("Problems to evaluate: held out, for training, or all.")] = "heldout"
    limit: Annotated[NonNegative, about("Evaluate the first problems only; 0: all.")] = 0
    samples: Annotated[
        int, about("Sampled completions per problem for avg@k and pass@k; 0: greedy only.", ge=0, le=4096)
    ] = 0
    output: Annotated[str, about("JSON file for all completions and results; it must not exist.")] = ""
    json: Annotated[bool, about("Print the results as JSON instead of a table.")] = False


class EvaluationArguments(Struct, frozen=True, kw_only=True):
    """A parsed command line of `eval`. adapters: path of each adapter by name."""

    profile: EvaluationProfile
    flags: EvaluationFlags
    adapters: dict[str, Path]


F = TypeVar("F", bound=ServeFlags | EvaluationFlags)

SERVE_OWN, EVAL_OWN = (
    {name: key for name, key in Keys(kind).settable.items() if key.help} for kind in (ServeFlags, EvaluationFlags)
)
"""Flags of the commands that are not keys of a profile."""

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

USED = EvaluationProfile.__struct_fields__
NOT_EVALUATED = frozenset({
    "sampling.group_size", "sampling.top_logprobs", "data.shuffle", "data.type_weights",
    "engine.decode_share", "engine.kv_policy", "engine.rollout_share",
})  # fmt: skip
"""Keys of these tables that concern training or serving only."""

SERVE_COMMON = (
    "model.path", "model.dtype", "server.host", "server.port", "server.api_key", "server.model_name",
    "sampling.max_tokens", "sampling.temperature", "engine.max_num_seqs", "engine.kv_cache_tokens",
)  # fmt: skip
EVAL_COMMON = (
    "model.path", "data.train", "data.heldout", "rewards", "sampling.max_tokens", "sampling.temperature", "seed",
)  # fmt: skip
SERVE_USAGE = f"usage: {program()} serve --model M [--adapter NAME=PATH ...] [--KEY VALUE ...]"
EVAL_USAGE = f"usage: {program()} eval --profile P [--model M] [--adapter [NAME=]PATH ...] [--KEY VALUE ...]"


def serve_help(argv: Sequence[str]) -> str | None:
    """The help text that a command line of `serve` requests; None if it requests none. Raises ProfileError."""
    topic = help_topic(argv)
    if topic is None:
        return None
    found = [key for path, key in APPLICABLE.items() if topic == "all" or f"{path}.".startswith(f"{topic}.")]
    if topic and not found:
        hint = did_you_mean(topic, list(APPLICABLE))
        raise ProfileError(f"--help {visible(topic, 60)}: `serve` has no section or key of this name{hint}")
    own = [SERVE_USAGE, *map(key_help, SERVE_OWN.values())] if topic in ("", "all") else []
    listed = found if topic else [APPLICABLE[path] for path in SERVE_COMMON]
    tables = ", ".join(ServingProfile.__struct_fields__)
    more = f"--help-all shows every flag, --help SECTION the flags of one section: {tables}."
    return "\n".join([*own, *map(key_help, listed), *([] if topic else [fill(more, WIDTH)])]) + "\n"


def evaluation_help(argv: Sequence[str]) -> str | None:
    """The help text that a command line of `eval` requests; None if it requests none."""
    if help_topic(argv) is None:
        return None
    tables = ", ".join([*USED, *sorted(used_by("eval"))])
    more = fill(f"Further flags are the keys of {tables}: see {program()} --help SECTION.", WIDTH)
    return (
        "\n".join(
            [EVAL_USAGE, *map(key_help, EVAL_OWN.values()), *(key_help(SETTABLE[path]) for path in EVAL_COMMON), more]
        )
        + "\n"
    )


def _given(
    argv: Sequence[str], command: str, kind: type[F], own: Mapping[str, Key], applies: Callable[[str], bool]
) -> tuple[F, dict[str, Any], Merged]:
    """Return the own flags of a command, its other settings, and these with those of the profile. Raises ProfileError.

    Flags must apply to the command. A profile may describe a training run: its other settings are not used.
    """
    values = parse_flags(argv, own, command)
    flags = kind(**{name: values.pop(name) for name in own if name in values})
    if unused := [path for path in values if not applies(path)]:
        raise ProfileError(
            f"{flag_of(unused[0])} is a setting of training runs, which {command} ignores: see {command} --help"
        )
    layers = file_layers(profile_path(flags.profile)) if flags.profile else []
    used = [
        Layer(label=layer.label, values={path: value for path, value in layer.values.items() if applies(path)})
        for layer in layers
    ]
    given = located(flatten(values, COMMAND_LINE), Path.cwd(), COMMAND_LINE)
    return flags, values, merge([*used, Layer(label=COMMAND_LINE, values=given)])


def load_serving(argv: Sequence[str]) -> ServeArguments:
    """Read a command line of `serve`, without the word `serve`. Raises ProfileError."""
    own, values, merged = _given(argv, "serve", ServeFlags, SERVE_OWN, APPLICABLE.__contains__)
    if "model.path" not in merged.values:
        raise ProfileError("serve needs a model: --model DIRECTORY, FILE.gguf, package:NAME/FILE or a hub repository")
    profile = decode_tables(merged, ServingProfile)
    replaced = any(REPLACES_WEIGHTS(profile.server))
    if not replaced and (unused := [path for path in values if path.startswith("policy.")]):
        raise ProfileError(f"{flag_of(unused[0])} has no effect without --server.accept-weights true")
    limit = profile.engine.kv_cache_tokens
    if profile.sampling.max_tokens >= limit:
        raise ProfileError(
            f"sampling.max_tokens = {profile.sampling.max_tokens} must be less than engine.kv_cache_tokens = {limit}"
        )
    named = profile.server.model_name if "server.model_name" in merged.values else ""
    for word in own.adapter:
        if "=" not in word:
            raise ProfileError(f"--adapter must be NAME=PATH, not {visible(word, 200)!r}")
    return ServeArguments(profile=profile, adapters=_adapters(own.adapter), model_name=named)


def load_evaluation(argv: Sequence[str]) -> EvaluationArguments:
    """Read a command line of `eval`, without the word `eval`. Raises ProfileError."""
    flags, _, merged = _given(argv, "eval", EvaluationFlags, EVAL_OWN, _is_evaluated)
    for path, flag in (("model.path", "--model"), ("data.train", "--dataset"), ("rewards", "--rewards")):
        if path not in merged.values:
            raise ProfileError(f"eval needs {path}: name a profile with --profile, or set {flag}")
    adapters = _adapters(flags.adapter, taken="base")
    if not flags.base and not adapters:
        raise ProfileError("--base false leaves nothing to evaluate: name an adapter with --adapter")
    return EvaluationArguments(profile=decode_tables(merged, EvaluationProfile), flags=flags, adapters=adapters)


def _is_evaluated(path: str) -> bool:
    return path.partition(".")[0] in {*USED, *used_by("eval")} and path not in NOT_EVALUATED | unused_by("eval")


def _adapters(given: Sequence[str], *, taken: str = "") -> dict[str, Path]:
    """Read `NAME=PATH`, or `PATH`, which is then the name too. taken: a name that is in use. Raises ProfileError."""
    found: dict[str, Path] = {}
    for word in given:
        name, equals, path = word.partition("=")
        if not equals:
            name, path = word.strip("./") if NAME.fullmatch(word.strip("./")) else f"adapter-{len(found) + 1}", word
        if not path or not NAME.fullmatch(name):
            allowed = "NAME=PATH with a name of letters, digits and . _ : / -"
            raise ProfileError(f"--adapter must be {allowed}, not {visible(word, 200)!r}")
        if name in found or name == taken:
            raise ProfileError(f"--adapter: the name {name} is taken; set another with NAME=PATH")
        found[name] = Path(path).expanduser()
    return found
