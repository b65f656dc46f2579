"""Damaged files, read in a process of their own, because native code that reads them could end it.

`python -m tests.damaged_files READER` reads a path per line of the standard input, and prints an outcome for each.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
"""Numbers at the limits of the integers that binary formats contain."""

LONGEST_MESSAGE = 1000


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return the content with one kind of change at one or more places."""
    data, kind = (
        bytearray(content),
        chance.choice(["bit", "byte", "number", "zeros", "cut", "insert", "repeat", "swap"]),
    )
    for _ in range(1 if kind == "cut" else chance.choice([1, 1, 1, 2, 4, 16])):
        at = chance.randrange(len(data))
        size = chance.choice([4, 8, chance.randrange(1, 64)])
        match kind:
            case "bit":
                data[at] ^= 1 << chance.randrange(8)
            case "byte":
                data[at] = chance.randrange(256)
            case "number":
                size = chance.choice([4, 8])
                at -= at % size
                number = chance.choice([*LIMITS, chance.randrange(2**64)]) % 2 ** (8 * size)
                data[at : at + size] = number.to_bytes(size, "little")
            case "zeros":
                data[at : at + size] = bytes(size)
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = chance.randbytes(size)
            case "repeat":
                data[at:at] = data[at : at + size]
            case "swap":
                other = chance.randrange(len(data))
                data[at], data[other] = data[other], data[at]
    return bytes(data)


def read_damaged(reader: str, files: Sequence[Path], count: int, *, seed: int) -> Counter[str]:
    """Damage each of the files in turn, and have `reader` read it; return how many were loaded and refused.

    Raises AssertionError if an outcome is neither, or if the process of the reader ends.
    """
    chance, outcomes = random.Random(seed), Counter[str]()
    command = [sys.executable, "-m", "tests.damaged_files", reader]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for number in range(count):
            file = files[number % len(files)]
            whole = file.read_bytes()
            file.write_bytes(damaged(whole, chance))
            child.stdin.write(f"{file}\n")
            child.stdin.flush()
            line = child.stdout.readline()
            assert line, f"case {number} of seed {seed}, {file}: the process ended with status {child.wait()}"
            outcome = json.loads(line)
            assert outcome in ("loaded", "refused"), f"case {number} of seed {seed}, {file}: {outcome}"
            outcomes[outcome] += 1
            file.write_bytes(whole)
        child.stdin.close()
    return outcomes


def _dataset(path: Path) -> None:
    from clotho.data.records import Source, read_records

    for _, record in read_records(Source(path=str(path))):
        repr(record)


def _adapter(path: Path) -> None:
    from training_run.adapters.reading import read_adapter_of

    read_adapter_of(path)


READERS: dict[str, Callable[[Path], None]] = {"dataset": _dataset, "adapter": _adapter}


def _outcome(read: Callable[[Path], None], path: Path) -> str:
    """Return `loaded`, `refused`, or what is wrong: an error that is no refusal, or one of several lines."""
    from protocols.errors import ClothoError

    try:
        read(path)
    except ClothoError as error:
        message = str(error)
        is_short = message and len(message.splitlines()) == 1 and len(message) < LONGEST_MESSAGE
        return "refused" if is_short else f"refused with {message!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


if __name__ == "__main__":
    for line in iter(sys.stdin.readline, ""):
        sys.stdout.write(json.dumps(_outcome(READERS[sys.argv[1]], Path(line.rstrip("\n")))) + "\n")
        sys.stdout.flush()
