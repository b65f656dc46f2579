# ruff: noqa: D103  (the name of a function says what it does)
"""Reward functions that misbehave in every known way.

`misbehaves` and `misbehaves_async` call the function that the first word of the completion names. Other completions
have their length as reward.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import math
import os
import re
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from protocols.prompt import Problem

FOREVER = 3600.0


def misbehaves(problem: Problem, completion: str) -> Any:
    """Call the function that the completion names."""
    function = globals().get(completion.partition(" ")[0])
    return float(len(completion)) if function is None else function(problem, completion)


BEHAVIORS = (
    "regex_without_end", "forks_and_returns", "forks_a_child_that_stays", "closes_descriptors", "closes_output",
    "segmentation_fault", "signals_its_group", "prints_without_end", "huge", "works",
)  # fmt: skip


def behavior(prompt: str) -> str:
    """Return the name of the function that `misbehaves_by_prompt` calls for a prompt."""
    return BEHAVIORS[hashlib.sha256(prompt.encode()).digest()[0] % len(BEHAVIORS)]


def misbehaves_by_prompt(problem: Problem, completion: str) -> Any:
    """Call the function that belongs to the prompt."""
    function = globals().get(behavior(problem.prompt))
    return float(len(completion)) if function is None else function(problem, completion)


async def misbehaves_async(problem: Problem, completion: str) -> Any:
    """Await the function that the completion names."""
    function = globals().get(completion.partition(" ")[0])
    return float(len(completion)) if function is None else await function(problem, completion)


def raises(problem: Problem, completion: str) -> float:
    raise ValueError("no opinion")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def unprintable(problem: Problem, completion: str) -> float:
    raise UnprintableError


def hangs(problem: Problem, completion: str) -> float:
    time.sleep(FOREVER)
    return 0.0


def hangs_for_one_completion(problem: Problem, completion: str) -> float:
    if completion.endswith("22"):
        time.sleep(FOREVER)
    return 0.0


def swallows_everything(problem: Problem, completion: str) -> float:
    while True:
        with suppress(BaseException):
            time.sleep(FOREVER)


def regex_without_end(problem: Problem, completion: str) -> bool:
    return re.match(r"(a+)+$", "a" * 60 + "b") is None


def nan(problem: Problem, completion: str) -> float:
    return math.nan


def infinity(problem: Problem, completion: str) -> float:
    return math.inf


def huge(problem: Problem, completion: str) -> float:
    return 1e308 if len(completion) % 2 else -1e308


def huge_integer(problem: Problem, completion: str) -> int:
    return 10**400


def slightly_too_large(problem: Problem, completion: str) -> float:
    return 1_000_000.5


def none(problem: Problem, completion: str) -> None:
    return None


def text(problem: Problem, completion: str) -> str:
    return "1.0"


def exits(problem: Problem, completion: str) -> float:
    sys.exit(3)


def exits_at_once(problem: Problem, completion: str) -> float:
    os._exit(3)


def exits_sometimes(problem: Problem, completion: str) -> float:
    if completion.endswith("22"):
        os._exit(4)
    return 0.0


def keyboard_interrupt(problem: Problem, completion: str) -> float:
    raise KeyboardInterrupt


def forks_and_exits(problem: Problem, completion: str) -> float:
    if os.fork() == 0:
        os._exit(0)
    return float(len(completion))


def forks_and_returns(problem: Problem, completion: str) -> float:
    os.fork()
    return float(len(completion))


def forks_and_raises_in_the_child(problem: Problem, completion: str) -> float:
    if os.fork() == 0:
        raise ValueError
    return float(len(completion))


def forks_a_child_that_stays(problem: Problem, completion: str) -> float:
    if os.fork() == 0:
        time.sleep(FOREVER)
    return float(len(completion))


def forks_a_child_that_stays_and_exits(problem: Problem, completion: str) -> float:
    if os.fork() == 0:
        time.sleep(FOREVER)
    os._exit(5)


def too_much_memory_at_once(problem: Problem, completion: str) -> float:
    return float(len(bytearray(20 * 2**30)))


def leaves_a_thread(problem: Problem, completion: str) -> float:
    threading.Thread(target=time.sleep, args=(FOREVER,)).start()
    return float(len(completion))


def changes_directory(problem: Problem, completion: str) -> float:
    os.chdir("/")
    return float(len(completion))


def signals_itself(problem: Problem, completion: str) -> float:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(FOREVER)
    return 0.0


def signals_its_group(problem: Problem, completion: str) -> float:
    os.killpg(0, signal.SIGKILL)
    return 0.0


def stops_itself(problem: Problem, completion: str) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0.0


def segmentation_fault(problem: Problem, completion: str) -> float:
    ctypes.string_at(0)
    return 0.0


def closes_output(problem: Problem, completion: str) -> float:
    sys.stdout.close()
    sys.stderr.close()
    return float(len(completion))


def redirects_output(problem: Problem, completion: str) -> float:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
    sys.stdout = None
    return float(len(completion))


def closes_descriptors(problem: Problem, completion: str) -> float:
    os.closerange(0, 4096)
    return 0.0


def replaces_descriptors(problem: Problem, completion: str) -> float:
    for descriptor in range(3, 1024):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    return 0.0


def writes_to_every_descriptor(problem: Problem, completion: str) -> float:
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, b"\x08\x00\x00\x00nonsense")
        except OSError:
            continue
    return 0.0


def prints_without_end(problem: Problem, completion: str) -> float:
    while True:
        sys.stdout.write("x" * 10_000 + "\n")


def prints(problem: Problem, completion: str) -> float:
    for i in range(2000):
        sys.stdout.write(f"{i} \x1b[2J\n")
    return float(len(completion))


def deep_recursion(problem: Problem, completion: str) -> float:
    return deep_recursion(problem, completion) + 1.0


def recursion_without_limit(problem: Problem, completion: str) -> float:
    sys.setrecursionlimit(2**30)
    value: list[Any] = []
    for _ in range(300_000):
        value = [value]
    return float(len(repr(value)) + len(completion))


def changes_the_problem(problem: Problem, completion: str) -> float:
    with suppress(TypeError):  # Python 3.11 and 3.12 refuse it
        object.__setattr__(problem, "answer", "changed")
    ctypes.memset(id(problem.prompt) + sys.getsizeof("") - 1, 0, min(4, len(problem.prompt)))
    return float(len(completion))


def raises_for_a_changed_problem(problem: Problem, completion: str) -> float:
    if completion.startswith("first") and (problem.answer == "changed" or "\0" in problem.prompt):
        raise ValueError("the problem is changed")
    return changes_the_problem(problem, completion)


async def hangs_async(problem: Problem, completion: str) -> float:
    await asyncio.sleep(FOREVER)
    return 0.0


async def swallows_cancellation(problem: Problem, completion: str) -> float:
    while True:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            continue


async def blocks_its_loop(problem: Problem, completion: str) -> float:
    time.sleep(FOREVER)  # noqa: ASYNC251
    return 0.0


async def stops_its_loop(problem: Problem, completion: str) -> float:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return float(len(completion))


async def works_async(problem: Problem, completion: str) -> float:
    await asyncio.sleep(0)
    return float(len(completion))


def grows(problem: Problem, completion: str) -> float:
    kept = []
    while True:
        kept.append(b"x" * 2**20)


def grows_without_limit(problem: Problem, completion: str) -> float:
    """Lift the limit of Linux first; macOS has none."""
    resource.setrlimit(resource.RLIMIT_DATA, resource.getrlimit(resource.RLIMIT_DATA)[1:] * 2)
    return grows(problem, completion)


KEPT: list[bytes] = []


def keeps_memory(problem: Problem, completion: str) -> float:
    """Each call is too fast to be watched; the limit of Linux is lifted."""
    resource.setrlimit(resource.RLIMIT_DATA, resource.getrlimit(resource.RLIMIT_DATA)[1:] * 2)
    KEPT.append(b"x" * 2**28)
    return float(len(completion))


def many_descriptors(problem: Problem, completion: str) -> float:
    """Write the number of descriptors beside the standard streams and the socket into the file of the answer."""
    others = [name for name in os.listdir("/dev/fd") if 2 < int(name) < 200]
    with open(problem.answer, "w") as file:
        file.write(str(len(others)))
    return float(len(completion))


def forks_a_child_and_names_it(problem: Problem, completion: str) -> float:
    """Write the number of the child into the file of the answer."""
    if (child := os.fork()) == 0:
        time.sleep(FOREVER)
    with open(problem.answer, "a") as file:
        file.write(f"{child} {os.getpid()}\n")
    return float(len(completion))


def detaches_a_process_and_names_it(problem: Problem, completion: str) -> float:
    """Start a process as a daemon does, in a session of its own, and write its number into the file of the answer."""
    if (child := os.fork()) == 0:
        os.setsid()
        if (detached := os.fork()) == 0:
            time.sleep(FOREVER)
        with open(problem.answer, "a") as file:
            file.write(f"{detached}\n")
        os._exit(0)
    os.waitpid(child, 0)
    return float(len(completion))


def detaches_a_process_and_hangs(problem: Problem, completion: str) -> float:
    detaches_a_process_and_names_it(problem, completion)
    time.sleep(FOREVER)
    return 0.0


def names_itself_and_hangs(problem: Problem, completion: str) -> float:
    """Write the number of the process into the file of the answer."""
    with open(problem.answer, "w") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(FOREVER)
    return 0.0


def names_itself_and_keeps_the_gil(problem: Problem, completion: str) -> bool:
    """Write the number of the process into the file of the answer."""
    with open(problem.answer, "w") as file:
        file.write(f"{os.getpid()}\n")
    return regex_without_end(problem, completion)


def meets_another_call(problem: Problem, completion: str) -> float:
    """Wait until two processes are in this function."""
    open(f"{problem.answer}/{os.getpid()}", "w").close()
    while len(os.listdir(problem.answer)) < 2:
        time.sleep(0.01)
    return float(len(completion))
