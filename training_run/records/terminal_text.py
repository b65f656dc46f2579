"""Text for the terminal: untrusted text, and formats of numbers, durations and sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from protocols.errors import visible
from protocols.finding import Finding

LINE_LIMIT = 1000
"""Maximum number of characters of a printed line."""


def terminal_text(text: str, limit: int, *, ascii_only: bool = False) -> str:
    """Return untrusted text as `visible` does; with `ascii_only`, for terminals without Unicode."""
    shown = visible(text, limit)
    return shown.replace("…", "~").encode("ascii", "replace").decode("ascii") if ascii_only else shown


def print_line(console: Console, line: str, *, style: str = "", limit: int = LINE_LIMIT) -> None:
    """Write one line of at most `limit` characters without wrapping, markup or control characters."""
    console.print(Text(terminal_text(line, limit, ascii_only=console.options.ascii_only), style), soft_wrap=True)


def in_lines(pieces: Iterable[str], width: int, *, indent: int = 0) -> Iterator[str]:
    """Yield lines of at most `width` characters with the pieces, two spaces between; later lines are indented."""
    line = ""
    for piece in pieces:
        joined = f"{line}  {piece}" if line.strip() else f"{line}{piece}"
        if line.strip() and len(joined) > width:
            yield line
            joined = f"{' ' * indent}{piece}"
        line = joined
    if line.strip():
        yield line


def wrapped(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Return the lines of a text of at most `width` characters; later lines are indented. Longer words stay whole."""
    wrapper = textwrap.TextWrapper(
        width=max(width, indent + 10),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    return wrapper.wrap(text)


def finding_lines(finding: Finding, width: int = 80) -> Iterator[str]:
    """Yield the lines that show a finding: name and fact, consequence, advice, command and example.

    The command is one line of any length, so that it can be copied.
    """
    yield from wrapped(f"{finding.severity}: {finding.name}: {finding.fact}", width, indent=2)
    yield from wrapped(f"  {finding.consequence}", width, indent=2)
    yield from wrapped(f"  do: {finding.advice}", width, indent=6)
    if finding.command:
        yield f"  {finding.use}: {finding.command}"
    if finding.example:
        yield from wrapped(f"  example: {finding.example}", width, indent=11)


def duration(seconds: float | None) -> str:
    """Format a duration: `0:07`, `12:30`, `1:02:03`; `-` if unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """Format a count with a decimal unit: `950`, `1.2M`, `14.8B`."""
    for unit in ("", "k", "M"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}B"


def memory(count: float) -> str:
    """Format bytes with a binary unit: `3.1 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} GiB"


def number(value: float | None, format_spec: str = ".3f") -> str:
    """Format a number; `-` for None."""
    return "-" if value is None else format(value, format_spec)


def milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds: `0.412 ms`."""
    return "-" if seconds is None else f"{seconds * 1000:.3g} ms"


def percent(fraction: float | None) -> str:
    """Format a fraction as a percentage: `43.4 %`; `-` for None."""
    return "-" if fraction is None else f"{fraction * 100:.1f} %"


def share(fraction: float | None) -> str:
    """Format a fraction as a percentage without decimals: `43 %`; `-` for None."""
    return "-" if fraction is None else f"{fraction * 100:.0f} %"


def relative_path(path: str | Path) -> str:
    """Return a path relative to the working directory if it is below it. Names of hub models stay unchanged."""
    absolute = Path(path)
    if absolute.is_absolute() and absolute.is_relative_to(Path.cwd()):
        return str(absolute.relative_to(Path.cwd()))
    return str(path)
