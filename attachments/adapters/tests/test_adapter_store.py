"""The store of adapters: names, limits, eviction, and what a failed load changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from attachments.adapters.adapter_store import AdapterStore
from attachments.adapters.tests.adapter_models import write_mlx_adapter
from clotho.settings.server import AdaptersSection
from protocols.errors import AdapterRequestError
from protocols.sampling import BASE
from tests.small_models import tiny

MODEL = tiny("qwen3")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Write an adapter of rank 4."""
    return write_mlx_adapter(tmp_path / "adapter", MODEL, rank=4)


def make_store(count: int = 2, *, max_bytes: int = 2**30) -> AdapterStore:
    """Return a store for `count` adapters."""
    return AdapterStore(MODEL, AdaptersSection(max_loaded=count, max_bytes=max_bytes))


def names(store: AdapterStore) -> list[str]:
    """Return the loaded names."""
    return [info.name for info in store.loaded()]


def test_the_least_recently_used_adapter_is_evicted(directory: Path) -> None:
    """Loading and sampling count as uses; listing does not."""
    store, contents = make_store(), make_store().read(directory)
    store.load("a", contents)
    store.load("b", contents)
    store.use("a")
    store.find("b")
    store.load("c", contents)
    assert names(store) == ["a", "c"]


def test_an_adapter_with_requests_is_never_evicted(directory: Path) -> None:
    """The next one in the order of use leaves instead; without one, the load is refused and nothing changes."""
    store, contents = make_store(), make_store().read(directory)
    a, b = store.load("a", contents), store.load("b", contents)
    store.load("c", contents, in_use=[a])
    assert names(store) == ["a", "c"]
    with pytest.raises(AdapterRequestError) as error:
        store.load("d", contents, in_use=[a, b, store.use("c")])
    assert error.value.reason == "full"
    assert names(store) == ["a", "c"]


def test_a_full_store_names_the_setting_that_is_exceeded(directory: Path) -> None:
    """In one line: the number of adapters, or their bytes."""
    contents = make_store().read(directory)
    for limits, key in (({"count": 1}, "max_loaded"), ({"max_bytes": contents.bytes}, "max_bytes")):
        store = make_store(**limits)
        store.load("a", contents)
        with pytest.raises(AdapterRequestError, match=f"server.adapters.{key}") as refusal:
            store.load("b", contents, protected={"a"})
        assert refusal.value.reason == "full"
        assert "\n" not in str(refusal.value)


def test_a_protected_adapter_is_not_evicted(directory: Path) -> None:
    """An operator's own adapters stay, whatever clients load."""
    store, contents = make_store(), make_store().read(directory)
    store.load("own", contents)
    for name in ("a", "b", "c"):
        store.load(name, contents, protected={"own"})
    assert names(store) == ["c", "own"]


def test_the_size_of_all_adapters_is_limited(directory: Path) -> None:
    """Adapters are evicted until the new one fits."""
    size = make_store().read(directory).bytes
    store = make_store(10, max_bytes=2 * size + size // 2)
    contents = store.read(directory)
    for name in ("a", "b", "c"):
        store.load(name, contents)
    assert names(store) == ["b", "c"]


def test_replaced_versions_count_until_their_requests_end(directory: Path) -> None:
    """Reloads under load cannot exceed `max_bytes`; the version in use is not evicted for them."""
    contents = make_store().read(directory)
    store = make_store(10, max_bytes=2 * contents.bytes + contents.bytes // 2)
    first = store.load("a", contents)
    second = store.load("a", contents, replace=True, in_use=[first])
    with pytest.raises(AdapterRequestError) as refusal:
        store.load("a", contents, replace=True, in_use=[first, second])
    assert refusal.value.reason == "full"
    assert store.find("a") is second
    assert store.load("a", contents, replace=True, in_use=[second]).version > second.version


def test_a_taken_name_needs_a_replacement(directory: Path) -> None:
    """A replacement has a greater version, and does not count twice towards the limits."""
    store, contents = make_store(1), make_store().read(directory)
    first = store.load("a", contents)
    with pytest.raises(AdapterRequestError) as error:
        store.load("a", contents)
    assert error.value.reason == "exists"
    second = store.load("a", contents, replace=True)
    assert second.version > first.version
    assert second.fingerprint == first.fingerprint
    assert store.use("a") is second


def test_equal_fingerprints_mean_equal_weights_and_scales(tmp_path: Path) -> None:
    """Another seed or another scale changes the fingerprint."""
    store = make_store(4)
    paths = [
        write_mlx_adapter(tmp_path / name, MODEL, rank=4, scale=scale, seed=seed)
        for name, scale, seed in (("a", 1.0, 1), ("b", 1.0, 1), ("c", 2.0, 1), ("d", 1.0, 2))
    ]
    prints = [store.load(path.name, store.read(path)).fingerprint for path in paths]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("name", ["", "@policy", BASE, "../a", ".hidden", "a b", "a\n", "x" * 129, "é"])
def test_reserved_and_strange_names_are_refused(name: str, directory: Path) -> None:
    """A name is a key of the store, never a path."""
    store = make_store()
    with pytest.raises(AdapterRequestError) as error:
        store.load(name, store.read(directory))
    assert error.value.reason == "invalid"
    assert names(store) == []


def test_unknown_names_are_refused_with_a_hint(directory: Path) -> None:
    """Both for sampling and for unloading."""
    store = make_store()
    store.load("letters", store.read(directory))
    for call in (store.use, store.unload):
        with pytest.raises(AdapterRequestError, match="letters") as error:
            call("leters")
        assert error.value.reason == "unknown"


def test_the_base_model_is_an_adapter_without_matrices_unless_its_weights_are_trained() -> None:
    """A policy that trains the base weights leaves no base model to serve."""
    base = make_store().use(BASE)
    assert (base.version, base.targets) == (0, ())
    trained = AdapterStore(MODEL, AdaptersSection(), base_is_served=False)
    with pytest.raises(AdapterRequestError):
        trained.use(BASE)


def test_limits_of_a_store_apply_to_reading(directory: Path) -> None:
    """A rank above the limit is refused before the adapter has a name."""
    store = AdapterStore(MODEL, replace(AdaptersSection(), max_rank=2))
    with pytest.raises(AdapterRequestError) as error:
        store.read(directory)
    assert error.value.reason == "invalid"
