"""Loading adapters for clients: paths inside the root, one name at a time, and load under traffic."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import mlx.core as mx
import pytest

from attachments.adapters.adapters import resolve_inside
from attachments.adapters.tests.adapter_server import Served, write_root
from clotho.lanes.compute_thread import finish
from clotho.settings.server import AdaptersSection
from protocols.errors import AdapterRequestError
from protocols.sampling import BASE, POLICY


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write adapters below a root directory, and one beside it."""
    return write_root(tmp_path)


@pytest.fixture
async def served(root: Path) -> AsyncIterator[Served]:
    """Serve adapters below the root."""
    running = Served(str(root), AdaptersSection(max_loaded=4))
    yield running
    running.compute.stop()


def test_paths_below_the_root_are_found(root: Path) -> None:
    """Relative to the root, or absolute."""
    assert resolve_inside(str(root), "a") == (root / "a").resolve()
    assert resolve_inside(str(root), "nested/b/") == (root / "nested" / "b").resolve()
    assert resolve_inside(str(root), str(root / "a")) == (root / "a").resolve()


@pytest.mark.parametrize(
    "given",
    ["", ".", "..", "../outside", "a/../../outside", "nested/..", "/etc", "/", "~", "a\0b", "x" * 5000, "link",
     "link/b", "https://host/adapter", "owner/repository"],
)  # fmt: skip
def test_no_path_leads_out_of_the_root(given: str, root: Path) -> None:
    """Nor through a link, whatever it points to; repositories of the hub are paths that do not exist."""
    (root / "link").symlink_to(root / "nested")
    with pytest.raises(AdapterRequestError) as error:
        resolve_inside(str(root), given)
    assert error.value.reason in ("invalid", "missing")
    assert "\n" not in str(error.value)


def test_an_absolute_path_outside_the_root_is_refused_whether_it_exists_or_not(root: Path) -> None:
    """The answer does not tell a client which files exist."""
    refusals = []
    for given in (root.parent / "outside", root.parent / "absent"):
        with pytest.raises(AdapterRequestError) as error:
            resolve_inside(str(root), str(given))
        refusals.append((error.value.reason, str(error.value).replace("absent", "outside")))
    assert refusals[0] == refusals[1]


def test_a_root_that_is_a_link_is_followed(root: Path, tmp_path: Path) -> None:
    """The operator chose the root; only paths of clients are not trusted."""
    alias = tmp_path / "alias"
    alias.symlink_to(root)
    assert resolve_inside(str(alias), str(alias / "a")) == (root / "a").resolve()


async def test_without_a_root_clients_load_nothing() -> None:
    """The operator can still load adapters."""
    with pytest.raises(AdapterRequestError) as error:
        resolve_inside("", "a")
    assert error.value.reason == "disabled"


async def test_a_loaded_adapter_samples_until_it_is_unloaded(served: Served) -> None:
    """The registry lists what is loaded."""
    info = await served.registry.load_path("a", "a", replace=False)
    assert served.registry.loaded == {"a": info}
    assert await served.sample("a") != await served.sample(BASE)
    await served.registry.unload("a")
    assert served.registry.loaded == {}
    with pytest.raises(AdapterRequestError) as error:
        await served.registry.unload("a")
    assert error.value.reason == "unknown"


async def test_a_refused_adapter_changes_nothing(served: Served, root: Path) -> None:
    """The version that is loaded stays."""
    before = await served.registry.load_path("a", "a", replace=False)
    tokens = await served.sample("a")
    os.truncate(root / "nested" / "b" / "adapters.safetensors", 100)
    with pytest.raises(AdapterRequestError) as error:
        await served.registry.load_path("a", "nested/b", replace=True)
    assert error.value.reason == "invalid"
    assert served.registry.loaded == {"a": before}
    assert await served.sample("a") == tokens


async def test_a_taken_name_needs_replace(served: Served) -> None:
    """The second load has a greater version."""
    first = await served.registry.load_path("a", "a", replace=False)
    with pytest.raises(AdapterRequestError) as error:
        await served.registry.load_path("a", "a", replace=False)
    assert error.value.reason == "exists"
    assert (await served.registry.load_path("a", "nested/b", replace=True)).version > first.version


async def test_no_adapter_takes_the_name_of_another_model(served: Served) -> None:
    """Requests would not reach it."""
    for name in ("policy", "models/base"):
        with pytest.raises(AdapterRequestError) as error:
            await served.registry.load_path(name, "a", replace=True)
        assert error.value.reason == "invalid"
    assert served.registry.loaded == {}


async def swap_under_load(served: Served, swaps: int) -> int:
    """Reload two names in turn while clients sample from both, the policy and the base model; return their count."""
    paths, done, completed = ("a", "nested/b"), anyio.Event(), 0
    for name in ("one", "two"):
        await served.registry.load_path(name, "a", replace=True)

    async def client(weights: str) -> None:
        nonlocal completed
        while not done.is_set():
            assert len(await served.sample(weights, seed=completed)) == 8
            completed += 1

    async with anyio.create_task_group() as tasks:
        for weights in ("one", "two", POLICY, BASE, "one"):
            tasks.start_soon(client, weights)
        for number in range(swaps):
            await served.registry.load_path(("one", "two")[number % 2], paths[number // 2 % 2], replace=True)
        done.set()
    return completed


async def memory(served: Served) -> int:
    """Return the memory of all MLX arrays."""
    return await finish(served.compute.decode.submit(mx.get_active_memory))


async def test_swaps_under_load_fail_no_request(served: Served) -> None:
    """And the memory of replaced versions is freed."""
    await swap_under_load(served, 8)
    before = await memory(served)
    assert await swap_under_load(served, 20) > 0
    assert await memory(served) - before < 200_000


@pytest.mark.slow
async def test_a_thousand_swaps_under_load_fail_no_request_and_leave_memory_flat(served: Served) -> None:
    """The same for a long time: an adapter of the test has more than 20 kB, so a leak of one per swap would show."""
    await swap_under_load(served, 50)
    before = await memory(served)
    assert await swap_under_load(served, 1000) > 100
    assert await memory(served) - before < 200_000
