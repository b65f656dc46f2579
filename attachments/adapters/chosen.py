"""Adapters that the operator names, in any form, for requests beside those of the policy."""

from __future__ import annotations

from pathlib import Path

from attachments.adapters.adapter_store import AdapterStore
from clotho.models.adapter_formats import LABELS
from clotho.models.adapter_reading import read_adapter_of
from clotho.models.adapters import Adapter
from protocols.errors import ProfileError, visible
from training_run.start.adapter_settings import find_adapter


def read_chosen(path: Path, model: str, store: AdapterStore) -> Adapter:
    """Read an adapter that the operator names, in any of the forms of `policy.adapter`, in a compute thread.

    model: value of `model.path`. Raises an error with exit status 2, also for what cannot be served beside other
    adapters: magnitudes, weights in full, adapters of embeddings, and what exceeds the limits of the store.
    """
    flag = "--adapter"
    found = read_adapter_of(find_adapter(str(path), flag), model)
    if found.has_magnitudes or found.weights:
        what = LABELS[found.method] if found.has_magnitudes else "weights in full"
        raise ProfileError(f"{flag}: {path} has {what}; only LoRA can be served beside other adapters")
    if others := [module for module in found.ranks if module not in store.targets]:
        raise ProfileError(f"{flag}: {path} adapts {visible(others[0], 100)}, which is not served with adapters")
    for key, value in (("max_rank", found.rank), ("max_bytes", found.bytes)):
        if value > (limit := getattr(store.limits, key)):
            raise ProfileError(f"{flag}: {path} exceeds server.adapters.{key} = {limit}: it has {value}")
    return found
