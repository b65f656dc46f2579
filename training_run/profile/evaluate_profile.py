"""The settings of the command `eval`: tables of a profile that concern an evaluation, its own flags, and its help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

from msgspec import Struct

from clotho.settings.bounds import NonNegative, about
from clotho.settings.data import DataSection, RewardSection
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.keys import Keys
from clotho.settings.layers import COMMAND_LINE, Layer
from clotho.settings.model import ModelSection
from protocols.errors import ProfileError, visible
from training_run.profile.flags import WIDTH, help_topic, key_help, parse_flags
from training_run.profile.keys import SETTABLE, flag_of
from training_run.profile.load import decode_tables, file_layers, flatten, located, merge, profile_path
from training_run.profile.mounted import unused_by, used_by
from training_run.profile.program import program
from training_run.profile.schema import MemorySection
from training_run.profile.serve_profile import NAME

Part = Literal["heldout", "train", "all"]


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


OWN = {name: key for name, key in Keys(EvaluationFlags).settable.items() if key.help}
USED = ("model", "data", "sampling", "engine", "memory", "rewards", "seed")
NOT_EVALUATED = frozenset({
    "sampling.group_size", "sampling.top_logprobs", "data.shuffle", "data.type_weights",
    "engine.decode_share", "engine.kv_policy", "engine.rollout_share",
})  # fmt: skip
"""Keys of these tables that concern training or serving only."""

COMMON = ("model.path", "data.train", "data.heldout", "rewards", "sampling.max_tokens", "sampling.temperature", "seed")
USAGE = f"usage: {program()} eval --profile P [--model M] [--adapter [NAME=]PATH ...] [--KEY VALUE ...]"


def evaluation_help(argv: Sequence[str]) -> str | None:
    """The help text that a command line of `eval` requests; None if it requests none."""
    if help_topic(argv) is None:
        return None
    tables = ", ".join([*USED, *sorted(used_by("eval"))])
    more = fill(f"Further flags are the keys of {tables}: see {program()} --help SECTION.", WIDTH)
    return "\n".join([USAGE, *map(key_help, OWN.values()), *(key_help(SETTABLE[path]) for path in COMMON), more]) + "\n"


def load_evaluation(argv: Sequence[str]) -> EvaluationArguments:
    """Read a command line of `eval`, without the word `eval`. Raises ProfileError."""
    values = parse_flags(argv, OWN, "eval")
    flags = EvaluationFlags(**{name: values.pop(name) for name in OWN if name in values})
    if unused := [path for path in values if not _applies(path)]:
        raise ProfileError(f"{flag_of(unused[0])} is a setting of training runs, which eval ignores: see eval --help")
    layers = file_layers(profile_path(flags.profile)) if flags.profile else []
    used = [Layer(label=layer.label, values=_applicable(layer.values)) for layer in layers]
    given = located(flatten(values, COMMAND_LINE), Path.cwd(), COMMAND_LINE)
    merged = merge([*used, Layer(label=COMMAND_LINE, values=given)])
    for path, flag in (("model.path", "--model"), ("data.train", "--dataset"), ("rewards", "--rewards")):
        if path not in merged.values:
            raise ProfileError(f"eval needs {path}: name a profile with --profile, or set {flag}")
    adapters = _adapters(flags.adapter)
    if not flags.base and not adapters:
        raise ProfileError("--base false leaves nothing to evaluate: name an adapter with --adapter")
    return EvaluationArguments(profile=decode_tables(merged, EvaluationProfile), flags=flags, adapters=adapters)


def _applies(path: str) -> bool:
    return path.partition(".")[0] in {*USED, *used_by("eval")} and path not in NOT_EVALUATED | unused_by("eval")


def _applicable(values: dict[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in values.items() if _applies(path)}


def _adapters(given: Sequence[str]) -> dict[str, Path]:
    """Read `PATH` or `NAME=PATH`; without a name, the path is the name. Raises ProfileError."""
    found: dict[str, Path] = {}
    for word in given:
        name, equals, path = word.partition("=")
        if not equals:
            name, path = word.strip("./") if NAME.fullmatch(word.strip("./")) else f"adapter-{len(found) + 1}", word
        if not path or not NAME.fullmatch(name):
            allowed = "PATH or NAME=PATH with a name of letters, digits and . _ : / -"
            raise ProfileError(f"--adapter must be {allowed}, not {visible(word, 200)!r}")
        if name in found or name == "base":
            raise ProfileError(f"--adapter: the name {name} is taken; set another with NAME=PATH")
        found[name] = Path(path).expanduser()
    return found
