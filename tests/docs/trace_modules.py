"""Records the modules of the three paths on docs/flow.md, and writes them into the page.

    python -m tests.docs.trace_modules training|request|flag     print the modules of one path as JSON
    python -m tests.docs.trace_modules write                     replace the three lists of docs/flow.md

A module is on a path if one of its functions executes. Executing the module body (an import) does not count. The CPU
backend is off and its package `clotho/cpu` is not listed, so that the lists are those of a GPU on every platform.
"""

from __future__ import annotations

import ast
import asyncio
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from msgspec import Struct

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "flow.md"
OURS = tuple(f"{ROOT}/{name}" for name in ("actors/", "clotho/", "protocols/", "pipeline.py"))
CPU_BACKEND = "clotho/cpu/"
PATHS = ("training", "request", "flag")
TRAINING_ACTORS = ("prompter", "generator", "scorer", "learner", "broadcaster")
FLAG, VALUE = "--rollouts.max-batches-ahead", 37
"""The traced flag, with a value that occurs nowhere else."""
RUN = (
    "--profile", "local-m3", "--steps", "1", "--learner.batch-size", "8", "--eval", "off",
    "--server", "off", "--monitor.display", "none", "--rewards", '[{name = "exact", correct = true}]',
)  # fmt: skip
Point = tuple[str, str]
"""Module path and function name."""


class ModuleTrace:
    """Records the modules whose functions execute while it is active, in all threads.

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
        self._begin, self._end, self._constructed, self._actors = begin, end, constructed, actors
        self._carrying = carrying
        self.active = False
        self.ended = False
        self._seen: set[CodeType] = set()
        self._points: dict[CodeType, Point | None] = {}
        self.modules: set[str] = set()

    def install(self) -> None:
        """Trace this thread and every thread that starts from now on."""
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Handle one call or return of a Python function."""
        code = frame.f_code
        if code not in self._points:
            self._points[code] = _point(code)
        point = self._points[code]
        if point is None or (event == "call" and code in self._seen and point != self._constructed):
            return
        if event == "return" and self.active and point == self._end:
            self.active, self.ended = False, True
        elif event == "call" and self.ended and point == self._constructed:
            self.modules |= set(_stack(frame))
        elif event == "call":
            self.active = self.active or (point == self._begin and not self.ended)
            if self.active and code not in self._seen and not _importing(frame) and self._on_path(frame):
                self._seen.add(code)
                self.modules.add(point[0])

    def _on_path(self, frame: FrameType) -> bool:
        if self._carrying:
            return any(_contains_flag(argument) for argument in list(frame.f_locals.values()))
        if not self._actors:
            return True
        if threading.current_thread() is not threading.main_thread():
            called = [module for module in _stack(frame) if module.startswith("actors/")]
            return all(module in {f"actors/{actor}.py" for actor in self._actors} for module in called)
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return False
        name = task.get_name() if task else ""
        return any(name == actor or name.startswith(f"actors.{actor}.") for actor in self._actors)


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


def training_modules() -> set[str]:
    """Modules from the first prompt of a run to its first published policy version."""
    trace = ModuleTrace(
        begin=("actors/prompter.py", "run"), end=("clotho/models/policy.py", "publish"), actors=TRAINING_ACTORS
    )
    _train(trace, "--async", "false")
    return trace.modules


def flag_modules() -> set[str]:
    """Modules that a flag passes from the command line to the actor that uses its value."""
    trace = ModuleTrace(
        begin=("clotho/__main__.py", "prepare"),
        end=("clotho/config/load.py", "load_profile"),
        constructed=("actors/generator.py", "__init__"),
        carrying=True,
    )
    _train(trace, FLAG, str(VALUE))
    return trace.modules


def _train(trace: ModuleTrace, *flags: str) -> None:
    trace.install()
    from clotho.__main__ import main

    with tempfile.TemporaryDirectory() as directory:
        status = main([*RUN, *flags, "--run-dir", f"{directory}/run"])
    sys.setprofile(None)
    if status or not trace.ended:
        raise RuntimeError(f"the run ended with status {status} before the traced path was complete")


def request_modules() -> set[str]:
    """Modules from the ASGI application to the response of one chat request to the embedded policy."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trace = ModuleTrace()

    def client() -> None:
        ask(port, patience=60.0)
        trace.active = True
        ask(port, patience=0.0)
        trace.active = False
        sys.stdout.write(json.dumps(sorted(trace.modules)) + "\n")
        sys.stdout.flush()
        os._exit(0)  # the server of the main thread runs until the process ends

    trace.install()
    from bench.contenders.clotho_server import main

    threading.Thread(target=client).start()
    main(["--model", str(ROOT / "profiles" / "embedded"), "--port", str(port)])
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


def traced(path: str) -> list[str]:
    """Run one path in its own process and return its modules."""
    environment = os.environ | {"CLOTHO_CPU_KERNELS": "0"}
    command = [sys.executable, "-m", "tests.docs.trace_modules", path]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    modules: list[str] = json.loads(result.stdout.splitlines()[-1])
    return [module for module in modules if not module.startswith(CPU_BACKEND)]


def listed(path: str) -> list[str]:
    """The modules of a path on the page."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(f"<!-- {path}:begin -->")[2].partition(f"<!-- {path}:end -->")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


def write(path: str) -> None:
    """Replace the list of a path on the page: one row per module with the first sentence of its docstring."""
    rows = [f"| `{module}` | {_subject(module)} |" for module in traced(path)]
    table = "\n".join([f"| module ({len(rows)}) | subject |", "|---|---|", *rows])
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- {path}:begin -->")
    _, end, after = rest.partition(f"<!-- {path}:end -->")
    PAGE.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def _subject(module: str) -> str:
    docstring: Any = ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8"))) or ""
    return str(docstring.partition("\n")[0]).replace("|", "\\|")


if __name__ == "__main__":
    chosen = sys.argv[1]
    if chosen == "write":
        for name in sys.argv[2:] or PATHS:
            write(name)
    else:
        functions = {"training": training_modules, "request": request_modules, "flag": flag_modules}
        sys.stdout.write(json.dumps(sorted(functions[chosen]())) + "\n")
