"""The settings that an adapter gives to the run that starts from it (`policy.adapter`): method, rank, scale, layers.

Settings of lower layers than the one with `policy.adapter` are overridden. Settings of the same or a higher layer must
agree with the adapter.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from clotho.models.loading import is_local
from clotho.models.model_files import read_object
from clotho.settings.keys import shown
from clotho.settings.model import Lora
from clotho.storage.adapters import CONFIG, read_adapter_config
from protocols.checkpoint import AdapterConfig
from protocols.errors import ArtifactError, ClothoError, ModelError, ProfileError, visible
from training_run.adapters.contents import Adapter
from training_run.adapters.formats import MlxLmConfig, config_type, is_named, place_of
from training_run.adapters.reading import listed, read_adapter_of
from training_run.directory.checkpoints import MANIFEST
from training_run.directory.run_paths import find_checkpoint, split_step
from training_run.profile.load import ADAPTER, Layer, merge

KEY, METHOD = ADAPTER, "policy.method."
FILES = (".gguf", ".npz", ".safetensors")

Values = dict[str, Any]


def find_adapter(text: str, flag: str = KEY) -> Path:
    """Return the adapter that `policy.adapter` names: a directory, or a file of the format NPZ or GGUF.

    flag: the setting with this value, for messages.
    text: an adapter of mlx-lm, PEFT, NPZ or GGUF, a checkpoint, RUN@STEP, or a run, whose final adapter is used, or its
    newest checkpoint if it has not ended. Raises an error with exit status 2 if there is none.
    """
    path, step = split_step(text)
    if step is not None or (path / MANIFEST).is_file():
        return find_checkpoint(text, flag)
    if path.suffix in FILES or (path / CONFIG).is_file():
        return path
    if (path / "adapters" / CONFIG).is_file():
        return path / "adapters"
    if (path / "checkpoints").is_dir():
        return find_checkpoint(text, flag)
    what = f"has no {CONFIG}" if path.exists() else "does not exist"
    raise ProfileError(f"{flag}: {visible(str(path), 200)} {what}: name an adapter, a checkpoint or a run")


def exists(text: str) -> bool:
    """Whether `find_adapter` finds an adapter."""
    try:
        find_adapter(text)
    except ClothoError:
        return False
    return True


def own_config(path: Path) -> AdapterConfig | None:
    """Return the configuration of weights that only Clotho and mlx-lm read, trained in full alone or beside an adapter.

    None for every other adapter. Raises CheckpointError.
    """
    if not (path / CONFIG).is_file():
        return None
    try:
        fields = read_object(path / CONFIG)
    except ModelError:
        return None  # `read_adapter_of` has the message
    is_own = fields.get("fine_tune_type") == "full" or fields.get("trained_weights")
    return read_adapter_config(path) if is_own and config_type(fields) is MlxLmConfig else None


def with_adapter(layers: list[Layer]) -> list[Layer]:
    """Return the layers with the settings of the adapter on top, if a layer names one.

    Raises ProfileError for a setting that contradicts the adapter, and the errors of reading the adapter.
    """
    merged = merge(layers)
    text = merged.values.get(KEY)
    if not text or not isinstance(text, str):
        return layers
    model = str(merged.values.get("model.path", ""))
    values = adapter_values(text, model)
    stated = {
        path: value
        for path, value in merged.values.items()
        if path.startswith(METHOD) and merged.origin[path] >= merged.origin[KEY]
    }
    for path, found in contradictions(stated, values):
        raise ProfileError(
            f"{merged.label(path)}: {path.removesuffix('.type')} = {shown(stated[path])} contradicts {KEY} = "
            f"{visible(text, 200)}, which has {found}: remove the setting, or start without the adapter"
        )
    return [*layers, Layer(label=KEY, values=values)]


def adapter_values(text: str, model: str) -> Values:
    """Return the settings of an adapter by key path. model: value of `model.path`; empty if it is unknown."""
    path = find_adapter(text)
    try:
        config = own_config(path)
        if config is not None:
            return _own_values(config)
        return _values(read_adapter_of(path, model if model and is_local(model) else ""))
    except ClothoError as error:
        raise ProfileError(f"{KEY}: {error}") from error


def _own_values(config: AdapterConfig) -> Values:
    parameters = config.lora_parameters
    if parameters is None:
        return {f"{METHOD}type": "full"}
    heads = {name for name in config.trained_weights if "head" in name or name.startswith("output")}
    return {
        f"{METHOD}type": config.fine_tune_type,
        f"{METHOD}rank": parameters.rank,
        f"{METHOD}ranks": tuple(f"{name}={config.ranks.get(name, parameters.rank)}" for name in parameters.keys),
        f"{METHOD}scale": parameters.scale,
        f"{METHOD}num_layers": config.num_layers,
        f"{METHOD}target_modules": parameters.keys,
        f"{METHOD}train_embeddings": bool(set(config.trained_weights) - heads),
        f"{METHOD}train_head": bool(heads),
    }


def _values(adapter: Adapter) -> Values:
    """Return the settings of LoRA or DoRA matrices. Raises ProfileError if one run cannot have all of them."""
    if adapter.weights:
        raise ProfileError(
            f"weights in full beside the matrices ({listed(sorted(adapter.weights))}) are read from runs of Clotho "
            "only: merge the adapter, and start from the merged model"
        )
    if outside := [module for module in adapter.ranks if place_of(module)[0] is None]:
        raise ProfileError(
            f"{visible(outside[0], 100)} has matrices and is outside of the transformer blocks: a run adapts modules "
            "of the blocks only"
        )
    rank_of = _ranks_by_name(adapter)
    rank = Counter(rank_of.values()).most_common(1)[0][0]
    of_experts = {place_of(module)[1] for module, target in adapter.targets.items() if target.experts}
    return {
        f"{METHOD}type": adapter.method,
        f"{METHOD}rank": rank,
        f"{METHOD}ranks": tuple(
            f"{name}={own}" for name, own in sorted(rank_of.items()) if own != rank or name in of_experts
        ),
        f"{METHOD}scale": main_scale(adapter),
        f"{METHOD}num_layers": _num_layers(adapter),
        f"{METHOD}target_modules": tuple(sorted(rank_of)),
        f"{METHOD}train_embeddings": False,
        f"{METHOD}train_head": False,
    }


def main_scale(adapter: Adapter) -> float:
    """Return the most common scale of an adapter's modules."""
    return Counter(adapter.scales.values()).most_common(1)[0][0]


def _num_layers(adapter: Adapter) -> int:
    """Return the number of adapted blocks, counted from the last; -1 for all. Raises ProfileError for other choices."""
    blocks = _blocks(adapter.ranks)
    first = min(map(min, blocks.values()))
    last = max(map(max, blocks.values()))
    base = _blocks(adapter.base.targets) if adapter.base else {}
    existing = base or {name: set(range(first, last + 1)) for name in blocks}
    count = max(map(max, existing.values())) + 1
    for name, found in sorted(blocks.items()):
        wanted = {block for block in existing.get(name, found) if block >= first}
        if missing := sorted(wanted - found):
            raise ProfileError(
                f"{name} has matrices in {len(found)} blocks and none in block {missing[0]}: a run adapts a module in "
                "all of the last blocks"
            )
    return -1 if first == 0 else count - first


def _blocks(modules: Iterable[str]) -> dict[str, set[int]]:
    """Return the blocks that have a module, by block-relative name."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for block, name in map(place_of, modules):
        if block is not None:
            found[name].add(block)
    return dict(found)


def contradictions(stated: Values, found: Values) -> Iterator[tuple[str, str]]:
    """Yield the stated keys that contradict the adapter, each with what the adapter has.

    stated, found: values by key path. Names of modules may be short in `stated`.
    """
    for path, value in stated.items():
        key = path.removeprefix(METHOD)
        if not (COMPARED[key](value, found, stated) if key in COMPARED else value == found.get(path, value)):
            yield path, _of_adapter(key, found)


def _of_adapter(key: str, found: Values) -> str:
    if key == "alpha":
        return f"the scale {found.get(f'{METHOD}scale')} and the rank {found.get(f'{METHOD}rank')}"
    return f"{key} = {shown(found.get(f'{METHOD}{key}'))}"


def _same_scale(value: Any, found: Values, _: Values) -> bool:
    scale = found.get(f"{METHOD}scale")
    return scale is None or (isinstance(value, int | float) and math.isclose(value, scale, rel_tol=1e-6))


def _same_alpha(value: Any, found: Values, stated: Values) -> bool:
    rank, scale = found.get(f"{METHOD}rank"), found.get(f"{METHOD}scale")
    if rank is None or scale is None or not isinstance(value, int | float) or value <= 0:
        return True
    scaling = stated.get(f"{METHOD}scaling", "standard")
    if scaling not in ("standard", "rank_stabilized"):
        return True
    return math.isclose(Lora(rank=rank, alpha=value, scaling=scaling).effective_scale, scale, rel_tol=1e-6)


def _same_modules(value: Any, found: Values, _: Values) -> bool:
    names = found.get(f"{METHOD}target_modules", ())
    wanted = value if isinstance(value, list | tuple) else []
    chosen = {name for name in names for short in wanted if is_named(name, str(short))}
    used = all(any(is_named(name, str(short)) for name in names) for short in wanted)
    return not wanted or (chosen == set(names) and used)


def _same_ranks(value: Any, found: Values, _: Values) -> bool:
    names, default = found.get(f"{METHOD}target_modules", ()), found.get(f"{METHOD}rank")
    own = dict(str(entry).split("=", 1) for entry in found.get(f"{METHOD}ranks", ()))
    for entry in value if isinstance(value, list | tuple) else []:
        short, rank = str(entry).partition("=")[::2]
        if any(is_named(name, short) and str(own.get(name, default)) != rank for name in names):
            return False
    return True


COMPARED: dict[str, Callable[[Any, Values, Values], bool]] = {
    "scale": _same_scale, "alpha": _same_alpha, "target_modules": _same_modules, "ranks": _same_ranks,
}  # fmt: skip
"""Settings whose values can agree without being equal. What an adapter does not determine contradicts nothing."""


def _ranks_by_name(adapter: Adapter) -> dict[str, int]:
    """Return ranks by the names of modules in their blocks. Raises ArtifactError if a name has several ranks."""
    found: dict[str, tuple[int | None, int]] = {}
    for module, rank in adapter.ranks.items():
        block, name = place_of(module)
        first, own = found.setdefault(name, (block, rank))
        if own != rank:
            raise ArtifactError(
                f"{visible(name, 100)} has rank {own} in block {first} and rank {rank} in block {block}: modules of "
                "one name share a rank",
                reason="inexpressible",
            )
    return {name: rank for name, (_, rank) in found.items()}
