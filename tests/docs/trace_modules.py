"""Records the modules of the three paths on docs/flow-modules.md, and writes them into the page.

    python -m tests.docs.trace_modules run DIRECTORY    print the modules of the paths of a run as JSON
    python -m tests.docs.trace_modules server           print the modules of the path of a chat request
    python -m tests.docs.trace_modules write            replace the three lists of docs/flow-modules.md

A module is on a path if one of its functions executes. Executing the module body (an import) does not count. The CPU
backend is off and its package `attachments/cpu` is not listed, so that the lists are those of a GPU on every platform.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from msgspec import Struct

from tests.docs.pages import between, replace_between
from tests.e2e.pipeline_process import FEW_PROBLEMS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "flow-modules.md"
ROOMS = ("actors/", "attachments/", "clotho/", "protocols/", "training_run/", "pipeline.py")
OURS = tuple(f"{ROOT}/{name}" for name in ROOMS)
CPU_BACKEND = "attachments/cpu/"
TRACED = {"training": "run", "flag": "run", "request": "server"}
"""The paths, each with the process that executes it."""
TRAINING_ACTORS = ("prompter", "generator", "scorer", "learner", "broadcaster")
PUBLISHED = ("clotho/models/policy.py", "publish")
FLAG, VALUE = "--rollouts.max-batches-ahead", 37
"""The traced flag, with a value that occurs nowhere else."""
RUN = (
    "--profile", "local-m3", "--steps", "1", "--learner.batch-size", "4", "--sampling.group-size", "4",
    "--sampling.max-tokens", "64", "--eval", "off", *FEW_PROBLEMS,
    "--server", "off", "--monitor.display", "none", "--rewards", '[{name = "exact", correct = true}]',
)  # fmt: skip
PERIODIC = ("resource watch", "startup watch")
"""Threads whose work depends on the duration of the run and not on its path."""

RECORDS = ("training_run/records/", "training_run/directory/", "attachments/dashboard/", "clotho/storage/")
"""What is written in threads is not on the path; it may happen before or after the end of a trace."""

Point = tuple[str, str]
"""Module path and function name."""
TraceFunction = Callable[[FrameType, str, Any], Any]


class ModuleTrace:
    """Records the modules whose functions execute while it is active, in all threads that a `Tracer` observes.

    begin, end: the functions whose call starts and whose return stops the trace. constructed: after the end, also
    record the modules on the call stack of this function. actors: record only tasks of these actors, and their calls in
    other threads. carrying: record only functions with an argument that contains the traced flag or its value.
    """

    def __init__(
        self,
        *,
        begin: Point | None = None,
        end: Point | None = None,
        constructed: Point | None = None,
        actors: tuple[str, ...] = (),
        carrying: bool = False,
    ) -> None:
        self._begin, self.end, self._constructed, self._actors = begin, end, constructed, actors
        self._carrying = carrying
        self.active = False
        self.ended = False
        self._seen: set[CodeType] = set()
        self.modules: set[str] = set()

    def observe(self, frame: FrameType, event: str, point: Point) -> None:
        """Handle one call or return of one of our functions."""
        code = frame.f_code
        if event == "call" and code in self._seen and point != self._constructed:
            return
        if event == "return" and self.active and point == self.end:
            self.active, self.ended = False, True
        elif event == "call" and self.ended and point == self._constructed:
            self.modules |= set(_stack(frame))
        elif event == "call":
            self.active = self.active or (point == self._begin and not self.ended)
            if self.active and code not in self._seen and self._on_path(frame) and not _importing(frame):
                self._seen.add(code)
                self.modules.add(point[0])

    def _on_path(self, frame: FrameType) -> bool:
        if self._carrying:
            name = frame.f_code.co_filename  # attachments, and what asks them, receive the whole profile
            asked = name.endswith(("/attachment.py", "/extension.py"))
            return not asked and any(_contains_flag(argument) for argument in list(frame.f_locals.values()))
        if not self._actors:
            return True
        if (thread := threading.current_thread()) is not threading.main_thread():
            if thread.name.startswith(PERIODIC):
                return False
            stack = _stack(frame)
            if any(module.startswith(RECORDS) for module in stack):
                return False
            called = [module for module in stack if module.startswith("actors/")]
            return all(module in {f"actors/{actor}.py" for actor in self._actors} for module in called)
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return False
        name = task.get_name() if task else ""
        return any(name == actor or name.startswith(f"actors.{actor}.") for actor in self._actors)


class Tracer:
    """Passes the calls of our functions, and the ends of traces, to traces. on_end: called when the last has ended."""

    def __init__(self, *traces: ModuleTrace, on_end: Callable[[], object] = lambda: None) -> None:
        self._traces, self._on_end = traces, on_end
        self._points: dict[CodeType, Point | None] = {}
        self._ends = {trace.end for trace in traces}

    def install(self) -> None:
        """Observe this thread and every thread that starts from now on."""
        threading.settrace(self)
        sys.settrace(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> TraceFunction | None:
        """Handle a call. Returns a function that handles the return, if a trace ends with it."""
        code = frame.f_code
        if code not in self._points:
            self._points[code] = _point(code)
        point = self._points[code]
        if point is None:
            return None
        for trace in self._traces:
            trace.observe(frame, event, point)
        if point not in self._ends:
            return None
        frame.f_trace_lines = False
        return self._on_return

    def _on_return(self, frame: FrameType, event: str, _: object) -> TraceFunction:
        point = self._points[frame.f_code]
        if event == "return" and point is not None:
            for trace in self._traces:
                trace.observe(frame, event, point)
            if all(trace.ended for trace in self._traces):
                self._on_end()
        return self._on_return


def _point(code: CodeType) -> Point | None:
    """Module path and function name of our code; None for other code."""
    if not code.co_filename.startswith(OURS):
        return None
    return str(Path(code.co_filename).relative_to(ROOT)), code.co_name


def _stack(frame: FrameType | None) -> list[str]:
    """Our modules on the call stack."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            found.append(str(Path(frame.f_code.co_filename).relative_to(ROOT)))
        frame = frame.f_back
    return found


def _contains_flag(value: object, depth: int = 6) -> bool:
    """Whether a value is or contains the traced flag, its key or its value."""
    if depth == 0:
        return False
    if isinstance(value, str):
        return value in (FLAG, FLAG[2:], str(VALUE), "rollouts.max_batches_ahead")
    if isinstance(value, Mapping):
        return any(_contains_flag(item, depth - 1) for pair in list(value.items()) for item in pair)
    if isinstance(value, list | tuple):
        return any(_contains_flag(item, depth - 1) for item in value)
    if isinstance(value, Struct):
        return any(_contains_flag(getattr(value, name, None), depth - 1) for name in value.__struct_fields__)
    return isinstance(value, int) and not isinstance(value, bool) and value == VALUE


def _importing(frame: FrameType | None) -> bool:
    """Whether the frame belongs to the import of one of our modules."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(OURS):
            return not frame.f_code.co_filename.endswith("pipeline.py")
        frame = frame.f_back
    return False


def run_modules(directory: str) -> None:
    """Print the modules of two paths of one run, and end the process when both are complete.

    training: from the first prompt to the first published policy version. flag: from the command line to the actor that
    uses the value of the flag.
    """
    from training_run.__main__ import main

    importlib.import_module("pipeline")  # imports need no trace
    training = ModuleTrace(begin=("actors/prompter.py", "run"), end=PUBLISHED, actors=TRAINING_ACTORS)
    flag = ModuleTrace(
        begin=("training_run/main.py", "prepare"),
        end=("training_run/profile/load.py", "load_profile"),
        constructed=("actors/generator.py", "__init__"),
        carrying=True,
    )

    def finish() -> None:
        write_modules(training=training, flag=flag)
        os._exit(0)

    Tracer(training, flag, on_end=finish).install()
    status = main([*RUN, FLAG, str(VALUE), "--run-dir", f"{directory}/run"])
    raise RuntimeError(f"the run ended with status {status} before the traced paths were complete")


def write_modules(**traces: ModuleTrace) -> None:
    """Print the modules of paths as one line of JSON."""
    sys.stdout.write(json.dumps({path: sorted(trace.modules) for path, trace in traces.items()}) + "\n")
    sys.stdout.flush()


def server_modules() -> None:
    """Print the modules from the ASGI application to the response of one chat request to the embedded policy."""
    from clotho.inference import decoding
    from tests.docs.run_server import serve

    decoding.LONG_STEP = math.inf  # a step of a busy machine can take long, and is then divided
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trace = ModuleTrace()

    def client() -> None:
        ask(port, patience=60.0)
        trace.active = True
        ask(port, patience=0.0)
        trace.active = False
        write_modules(request=trace)
        os._exit(0)  # the server of the main thread runs until the process ends

    Tracer(trace).install()
    threading.Thread(target=client).start()
    serve(str(ROOT / "profiles" / "embedded"), port)
    raise RuntimeError("the server ended before the request")


def ask(port: int, *, patience: float) -> None:
    """Send one chat request; retry the connection for `patience` seconds while the server starts."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "What is 53 + 5 - 7?"}], "max_tokens": 8}
    deadline = time.monotonic() + patience
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        except ConnectionRefusedError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
            continue
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        response.read()
        return


def traced(process: str) -> dict[str, list[str]]:
    """Execute the paths of one process, and return the modules of each."""
    environment = os.environ | {"CLOTHO_CPU_KERNELS": "0"}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.docs.trace_modules", process, directory]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    found: dict[str, list[str]] = json.loads(result.stdout.splitlines()[-1])
    return {path: [one for one in modules if not one.startswith(CPU_BACKEND)] for path, modules in found.items()}


def listed(path: str) -> list[str]:
    """The modules of a path on the page."""
    lines = re.findall(r"^\* `([\w./]+)/`: (.+)$", between(PAGE, path), re.MULTILINE)
    return [str(Path(package, name)) for package, names in lines for name in re.findall(r"`(\w+\.py)`", names)]


def write(path: str, modules: list[str]) -> None:
    """Replace the list of a path on the page: one line per package."""
    packages: dict[Path, list[str]] = {}
    for module in map(Path, modules):
        packages.setdefault(module.parent, []).append(f"`{module.name}`")
    lines = [f"* `{package}/`: {', '.join(names)}" for package, names in packages.items()]
    replace_between(PAGE, path, "\n".join([f"{len(modules)} modules:", "", *lines]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", place]:
            run_modules(place)
        case ["server", *_]:
            server_modules()
        case ["write"]:
            for name in sorted(set(TRACED.values())):
                for path, modules in traced(name).items():
                    write(path, modules)
        case _:
            sys.exit(__doc__)
