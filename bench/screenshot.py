"""Capture the terminal display of a real run in a pseudo-terminal, as SVG.

    python -m bench screenshot [--columns 112] [--rows 42] [-- ARGUMENTS OF THE RUN]

Writes two pictures to docs/images/: the live display after half of the steps, and what the run writes at its end.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pyte
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from bench.figures import IMAGES
from bench.fingerprint import ROOT

RUN = "runs/picture"
VERDICT = "learned"
"""The begin of the first line that a run writes after the live display."""

HALF = re.compile(r"step (\d+)/(\d+)")


def run_in_terminal(command: Sequence[str], columns: int, rows: int) -> Iterator[bytes]:
    """Yield the output of a command that runs in a terminal of this size."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        while chunk := os.read(ours, 65536):
            yield chunk
    except OSError:  # how Linux says that the other end was closed
        pass
    finally:
        os.close(ours)
        process.wait()


def frame(screen: pyte.Screen) -> list[Text]:
    """The lines of the terminal with their colors."""
    lines = []
    for row in range(screen.lines):
        text = Text()
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            text.append(cell.data or " ", Style(color=_colour(cell.fg), bold=cell.bold, italic=cell.italics))
        text.rstrip()
        lines.append(text)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _colour(name: str) -> Color | None:
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return Color.parse(f"#{name}")
    return Color.parse({"brown": "yellow"}.get(name, name.replace("bright", "bright_")))


def draw(lines: Sequence[Text], target: Path, columns: int, title: str) -> None:
    """Write lines as an SVG picture of a terminal."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, soft_wrap=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(target), title=title, unique_id="clotho")


def main(argv: Sequence[str]) -> int:
    """Run the default profile in a terminal and draw two moments of it."""
    parser = argparse.ArgumentParser(prog="python -m bench screenshot", description=__doc__)
    parser.add_argument("--columns", type=int, default=112)
    parser.add_argument("--rows", type=int, default=42)
    parser.add_argument("arguments", nargs="*", default=[])
    chosen = parser.parse_args(argv)
    screen = pyte.Screen(chosen.columns, chosen.rows)
    stream = pyte.ByteStream(screen)
    title = "clotho --profile local-m3"
    during: list[Text] = []
    flags = ["--profile", "local-m3", "--run-dir", RUN, "--clean", *chosen.arguments]
    command = [sys.executable, "-m", "training_run", *flags]
    for chunk in run_in_terminal(command, chosen.columns, chosen.rows):
        stream.feed(chunk)
        found = HALF.search("\n".join(screen.display))
        if not during and found and 2 * int(found[1]) >= int(found[2]):
            during = frame(screen)
    draw(during, IMAGES / "running.svg", chosen.columns, title)
    end = frame(screen)
    first = next((number for number, line in enumerate(end) if line.plain.startswith(VERDICT)), 0)
    draw(end[first:], IMAGES / "finished.svg", chosen.columns, title)
    return 0
