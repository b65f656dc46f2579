"""Struct types are prepared before several threads decode them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from msgspec import Struct

from clotho.serving.struct_types import prepare_struct_types

ROOT = Path(__file__).parents[2]

FIRST_DECODES = '''
import sys, threading, types
import msgspec
from clotho.serving.struct_types import prepare_struct_types

SOURCE = """
import msgspec

class Part(msgspec.Struct):
    number: "int"
    text: "str" = ""

class Message(msgspec.Struct):
    first: "int | str | list[int] | None" = None
    second: "int | str | list[int] | None" = None
    part: "Part | None" = None
"""
sys.setswitchinterval(1e-6)
for number in range(int(sys.argv[1])):
    module = sys.modules[f"module{number}"] = types.ModuleType(f"module{number}")
    exec(SOURCE, module.__dict__)
    prepare_struct_types()
    together = threading.Barrier(4)

    def decode():
        together.wait()
        assert msgspec.convert({"part": {"number": 1}}, module.Message).part.number == 1

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
'''
"""Several threads decode the first value of a type, as often as the argument says. Without the preparation, msgspec
0.22 crashes the process after about ten types.
"""


def test_threads_decode_the_first_values_of_a_prepared_type() -> None:
    """Four threads at once, for each of 100 types."""
    finished = subprocess.run([sys.executable, "-c", FIRST_DECODES, "100"], cwd=ROOT, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_a_later_call_prepares_the_types_that_are_new() -> None:
    """Types of modules that were imported meanwhile."""
    prepare_struct_types()

    class Late(Struct):
        value: int

    assert Late in prepare_struct_types()
    assert Late not in prepare_struct_types()


def test_a_type_that_cannot_be_decoded_is_left_out() -> None:
    """An annotation without a meaning is no error: such a type is no message."""

    class Broken(Struct):
        value: NotDefined  # type: ignore[name-defined]  # noqa: F821

    assert Broken in prepare_struct_types()
