"""Fixtures, markers and lanes of all tests. Loads the BLAS before any test imports MLX.

Property tests of the fast set repeat the same 100 examples in every run. Those of the slow set draw 20,000 new examples
in every run; a failure prints the example and a `@reproduce_failure` line.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TextIO

import pytest
import structlog
from hypothesis import HealthCheck, settings

from clotho.backend import Backend, backend
from clotho.process import load_blas, usable_cores
from tests import model_lanes
from tests.extras import is_installed

load_blas()
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that a test starts would compile all modules,
sys.dont_write_bytecode = False  # and this one all tests
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # float32 products of recent GPUs have 11 significant bits otherwise

structlog.configure(  # by default, an exception is shown with all local variables, which takes half a second
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

settings.register_profile(
    "repeatable",
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("repeatable")
settings.register_profile(
    "many", settings.get_profile("repeatable"), max_examples=20_000, derandomize=False, print_blob=True
)

LIMIT_SECONDS = 600.0
"""How long a fast test may take. No test depends on it: a test that hangs is named instead of stopping the suite."""

STANDARD_ERROR = pytest.StashKey[TextIO]()
"""Standard error of the process, which pytest replaces while a test runs."""

WATCHED = pytest.StashKey[float]()
"""When `LIMIT_SECONDS` began, on the clock of `time.monotonic`."""


@pytest.fixture
def anyio_backend() -> str:
    """Run asynchronous tests on asyncio, as the program does."""
    return "asyncio"


@pytest.fixture
def device_path() -> Iterator[None]:
    """Compute as on a GPU: with MLX only."""
    with model_lanes.device_path():
        yield


@pytest.fixture
def mlx_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode every model with MLX."""
    monkeypatch.setattr(type(backend()), "row_decoder", lambda computing, model: None)


@pytest.fixture
def device_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample on the device, so that tokens are read one step later."""
    monkeypatch.setattr(type(backend()), "row_sampler", lambda computing, parameters: None)


def pytest_xdist_auto_num_workers() -> int:
    """Use one process more than cores, because many tests wait for a program that they start; at most five."""
    return min(usable_cores(), 4) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses a lane for all tests."""
    names = [name for name in model_lanes.LANES if name != model_lanes.DEFAULT.name]
    parser.addoption(
        "--lane", choices=names, help="Run the tests that compute in this lane only (tests/model_lanes.py)."
    )


@pytest.fixture(scope="session", autouse=True)
def signals_are_not_ignored() -> None:
    """Restore signals that tests inherit as ignored: SIGHUP under `nohup`, SIGINT in the background of a script."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Enter the lane of `--lane`, also for fixtures that several tests share."""
    config.stash[STANDARD_ERROR], config.stash[WATCHED] = os.fdopen(os.dup(2), "w"), -math.inf
    if name := config.getoption("--lane"):
        model_lanes.choose(model_lanes.LANES[name])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat the tests marked `lanes` in the lanes of their mark, or in all, without `--lane`."""
    marker = metafunc.definition.get_closest_marker("lanes")
    if marker and not metafunc.config.getoption("--lane"):
        names = [model_lanes.DEFAULT.name, *marker.args] if marker.args else list(model_lanes.LANES)
        metafunc.parametrize("lane", names, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """End the process of a fast test that takes longer than its limit, with the stacks of all threads.

    The limit is set anew once a minute: to set it starts a thread, which takes as long as a small test.
    """
    stash = item.config.stash
    if item.get_closest_marker("slow") is not None:
        faulthandler.cancel_dump_traceback_later()
        stash[WATCHED] = -math.inf
    elif time.monotonic() > stash[WATCHED] + 60.0:
        faulthandler.dump_traceback_later(LIMIT_SECONDS + 60.0, exit=True, file=stash[STANDARD_ERROR])
        stash[WATCHED] = time.monotonic()


def pytest_sessionfinish() -> None:
    """Let reports take as long as they need."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collections, and exclude the collected tests from later ones: they stay in use."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def runs_freeze_no_objects() -> Iterator[None]:
    """Let a run in this process leave the objects of the tests to the garbage collector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of the lanes, and skip tests of other systems."""
    selects = _computes if config.getoption("--lane") else _is_in_fast_lane
    kept, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (kept if selects(item) else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept
    for item in items:
        for marker in item.iter_markers("needs_extra"):
            if not is_installed(marker.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"{marker.args[0]} is not installed"))
        if sys.platform != "linux" and (linux := item.get_closest_marker("needs_linux")):
            item.add_marker(pytest.mark.skip(reason=f"Linux only: {linux.kwargs['reason']}"))


def _computes(item: pytest.Item) -> bool:
    """Whether `--lane` runs a test: it computes, and no parameter is the host path, which the lanes do not have."""
    on_host = any(isinstance(value, str) and value.partition(",")[0] == "host" for value in _parameters(item).values())
    place = item.path.relative_to(Path(__file__).parent).as_posix()
    return not on_host and place.startswith(model_lanes.COMPUTING)


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _is_in_fast_lane(item: pytest.Item) -> bool:
    """Whether a test runs without `--lane`: the arguments of its marker limit the parameters in further lanes."""
    parameters = _parameters(item)
    if parameters.get("lane", model_lanes.DEFAULT.name) == model_lanes.DEFAULT.name:
        return True
    marker = item.get_closest_marker("lanes")
    limits = marker.kwargs if marker else {}
    return all(parameters[name] in chosen for name, chosen in limits.items())


@pytest.fixture(autouse=True)
def lane(request: pytest.FixtureRequest) -> Iterator[model_lanes.Lane]:
    """Run the test in its lane."""
    chosen = model_lanes.LANES[request.param] if hasattr(request, "param") else model_lanes.current()
    with model_lanes.using(chosen):
        if request.node.get_closest_marker("needs_cpu_path") and type(backend()) is Backend:
            pytest.skip("the host path is off, or the device is a GPU")
        if request.node.get_closest_marker("needs_batch_invariance") and not model_lanes.is_batch_invariant():
            pytest.skip("the 16-bit kernels of a GPU depend on the number of rows")
        if request.node.get_closest_marker("needs_float32") and chosen.dtype != "float32":
            pytest.skip("the test needs float32, or chooses its precisions itself")
        yield chosen
