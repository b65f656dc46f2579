"""The process: threads share one arena of glibc's malloc, large blocks are returned, and MKL is initialized at once."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, re, sys, tempfile, threading
if len(sys.argv) > 1:
    from clotho.process import configure_malloc
    configure_malloc()

libc, barrier, kept, LARGE = ctypes.CDLL(None), threading.Barrier(4), [], ctypes.c_size_t(3 << 20)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p

def allocate():
    barrier.wait()
    kept.append(libc.malloc(ctypes.c_size_t(50_000)))
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
with tempfile.NamedTemporaryFile("r") as found:
    file = ctypes.c_void_p(libc.fopen(found.name.encode(), b"w"))
    libc.malloc(LARGE)
    libc.free(ctypes.c_void_p(libc.malloc(LARGE)))  # by default, malloc takes later blocks of this size from an arena
    libc.malloc(LARGE)
    libc.malloc_info(0, file)
    libc.fclose(file)
    report = found.read()
mapped_bytes = int(re.search(r'type="mmap" count="[0-9]+" size="([0-9]+)"', report)[1])
sys.stdout.write(f'{report.count("<heap nr=")} {mapped_bytes // LARGE.value}')
"""


def arenas_and_mapped_blocks(*arguments: str, **variables: str) -> tuple[int, int]:
    """Return the number of arenas, and of large blocks outside all arenas, of a process with four threads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    command = [sys.executable, "-c", PROGRAM, *arguments]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    arenas, blocks = map(int, output.split())
    return arenas, blocks


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are a property of glibc")
def test_threads_share_one_arena_and_large_blocks_are_in_none() -> None:
    """By default, each thread has an arena, and arenas hold large blocks once one has been freed. The environment has
    precedence.
    """
    arenas, blocks = arenas_and_mapped_blocks()
    assert arenas > 1
    assert blocks == 1
    assert arenas_and_mapped_blocks("configured") == (1, 2)
    variables = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**25)}
    assert arenas_and_mapped_blocks("configured", **variables) == (2, 0)


ENVIRONMENT = """
import ctypes
from clotho.process import load_blas
load_blas()

def variables():
    found = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    return [found[i] for i in range(next(i for i in range(10_000) if found[i] is None))]

before = variables()
import mlx.core as mx
mx.eval(mx.ones((300, 300)) @ mx.ones((300, 300)))
assert variables() == before, set(variables()) - set(before)
"""


@pytest.mark.needs_linux(reason="MLX starts a compiler there")
def test_the_first_product_changes_no_variable_of_the_environment() -> None:
    """MLX computes in a thread of its own, and the main thread may be starting g++ with these variables meanwhile."""
    subprocess.run([sys.executable, "-c", ENVIRONMENT], check=True)
