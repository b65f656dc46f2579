"""A name for a set of weights: equal weights have equal fingerprints."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx

from actors.compute.trees import flat


def fingerprint(parameters: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a parameter tree: names, types, shapes and bytes.

    Evaluates the arrays. The order of dictionaries and empty branches of the tree do not matter.
    """
    digest = hashlib.sha256()
    arrays = flat(parameters)
    mx.eval(arrays)
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        view = memoryview(array)  # type: ignore[arg-type]
        digest.update(view if view.c_contiguous else view.tobytes())
    return digest.hexdigest()[:16]
