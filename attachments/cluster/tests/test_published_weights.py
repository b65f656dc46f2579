"""Published weights: what the workers of a cluster fetch, and how often it is made."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np

from attachments.cluster.ray_worker import MAX_PATCHES, Publication, PublishedWeights
from attachments.remote.weight_patch import apply_patches
from attachments.remote.weights import Weights
from clotho.models.parameters import fingerprint
from clotho.storage.tensors import as_stored, named_arrays, parse_tensors
from protocols.step import WeightsReady


def version(number: int, *, share: float = 0.01) -> Weights:
    """Return a version of weights in bfloat16; a share of the elements differs from version to version."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 0x3F00, 20_000, np.uint16)
    for seed in range(1, number + 1):
        changed = np.random.default_rng(seed).random(bits.size) < share
        bits[changed] += 1
    parameters = {"model": {"weight": mx.array(bits).view(mx.bfloat16).reshape(100, 200)}}
    mx.eval(parameters)
    ready = WeightsReady(version=number, step=number, fingerprint=fingerprint(parameters))
    return Weights(ready=ready, parameters=parameters)


class Store:
    """An object store; the reference of an object is its number."""

    def __init__(self) -> None:
        self.objects: list[bytes] = []

    def put(self, content: bytes) -> int:
        """Store an object."""
        self.objects.append(content)
        return len(self.objects) - 1

    def served(self, publication: Publication, held: Weights) -> str:
        """Return the fingerprint of what a worker with the weights `held` serves afterwards."""
        contents = [self.objects[reference] for reference in publication.references]
        if not publication.patched:
            return fingerprint(parse_tensors(contents[0]))
        base = {name: as_stored(array) for name, array in named_arrays(held.parameters).items()}
        patched = apply_patches(contents, base, base_fingerprint=held.ready.fingerprint)
        arrays = {name: mx.array(one.data.view(np.uint16)).view(mx.bfloat16) for name, one in patched.items()}
        return fingerprint({name: array.reshape(patched[name].shape) for name, array in arrays.items()})


async def publish(published: PublishedWeights, weights: Weights, held: Weights | None = None) -> Publication:
    """Publish weights for a worker that has the weights `held`, or unknown ones."""
    return await published.publication(weights, held=held.ready.fingerprint if held else "")


async def test_a_worker_gets_a_patch_of_the_weights_that_it_has() -> None:
    """One small object serves all workers with these weights."""
    store, start, target = Store(), version(0), version(1)
    published = PublishedWeights(store.put, start=start)
    first = await publish(published, target, start)
    assert first.patched
    assert first.size == len(store.objects[0]) < 0.1 * 40_000
    assert store.served(first, start) == target.ready.fingerprint
    assert await publish(published, target, start) == first
    assert len(store.objects) == 1


async def test_a_worker_that_is_behind_gets_all_patches_since_its_weights() -> None:
    """The oldest first; versions that no worker needed have no patch."""
    store, versions = Store(), [version(number) for number in (0, 1, 3, 4)]
    published = PublishedWeights(store.put, start=versions[0])
    for before, after in pairwise(versions):
        await publish(published, after, before)
    late = await publish(published, versions[3], versions[0])
    assert (late.patched, len(late.references), len(store.objects)) == (True, 3, 3)
    assert store.served(late, versions[0]) == versions[3].ready.fingerprint


async def test_a_worker_with_other_weights_gets_the_whole_file() -> None:
    """It has been written once; an older version than the newest one is whole too."""
    store, versions = Store(), [version(number) for number in range(3)]
    published = PublishedWeights(store.put, start=versions[0])
    await publish(published, versions[2], versions[0])
    whole = [await publish(published, versions[2]) for _ in range(2)]
    assert [(one.patched, one.references) for one in whole] == [(False, (1,))] * 2
    assert store.served(whole[0], versions[0]) == versions[2].ready.fingerprint
    older = await publish(published, versions[1], versions[0])
    assert not older.patched
    assert store.served(older, versions[0]) == versions[1].ready.fingerprint


async def test_weights_that_have_changed_everywhere_are_whole() -> None:
    """Later versions have patches again, but only for workers that have these weights."""
    store, start, near, far = Store(), version(0), version(1), version(2, share=0.9)
    published = PublishedWeights(store.put, start=start)
    assert (await publish(published, near, start)).patched
    assert not (await publish(published, far, near)).patched
    later = Weights(ready=WeightsReady(version=3, step=3, fingerprint="later"), parameters=far.parameters)
    assert (await publish(published, later, far)).patched
    assert not (await publish(published, later, start)).patched


async def test_the_number_of_patches_is_limited() -> None:
    """A worker that is further behind gets the whole file."""
    store, versions = Store(), [version(number, share=0.001) for number in range(MAX_PATCHES + 2)]
    published = PublishedWeights(store.put, start=versions[0])
    for weights in versions[1:]:
        await publish(published, weights, versions[0])
    assert (await publish(published, versions[-1], versions[1])).patched
    assert not (await publish(published, versions[-1], versions[0])).patched


async def test_without_patches_each_version_is_one_whole_object() -> None:
    """Adapters: their values change everywhere."""
    store, versions = Store(), [version(number) for number in range(3)]
    published = PublishedWeights(store.put)
    for weights in versions:
        assert not any([(await publish(published, weights, versions[0])).patched for _ in range(2)])
    assert len(store.objects) == 3
