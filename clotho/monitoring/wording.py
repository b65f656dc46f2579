"""Numbers as people read them."""

from __future__ import annotations

from pathlib import Path


def duration(seconds: float | None) -> str:
    """`0:07`, `12:30`, `1:02:03`; `-` where unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """A count with its thousands folded: `950`, `1.2M`, `14.8B`."""
    for unit in ("", "k", "M"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}B"


def memory(count: float) -> str:
    """Bytes in binary units: `3.1 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} GiB"


def number(value: float | None, form: str = ".3f") -> str:
    """A number in a form; `-` where there is none."""
    return "-" if value is None else format(value, form)


def milliseconds(seconds: float | None) -> str:
    """`0.412 ms`."""
    return "-" if seconds is None else f"{seconds * 1000:.3g} ms"


def percent(share: float) -> str:
    """`43.4 %`."""
    return f"{share * 100:.1f} %"


def shown_path(path: str | Path) -> str:
    """A path as one would type it here: relative where it lies below the current directory. Hub names stay."""
    absolute = Path(path)
    if absolute.is_absolute() and absolute.is_relative_to(Path.cwd()):
        return str(absolute.relative_to(Path.cwd()))
    return str(path)
