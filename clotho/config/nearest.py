"""The nearest thing that there is to what somebody wrote."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

from clotho.config.flag_aliases import ALIASES
from clotho.config.keys import keys, names, sections, settable

CUTOFF = 0.6
"""Similarity below which a suggestion would be a guess."""

HANDICAP = 0.05
"""By how much a key of another section must be more similar to be preferred."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to `word`, or None where none is similar. Case, `-` and `_` do not count."""
    scored = [(_similarity(word, candidate), candidate) for candidate in candidates]
    best, candidate = max(scored, default=(0.0, ""))
    return candidate if best >= CUTOFF else None


def nearest_key(path: str) -> str:
    """What to write instead of the unknown `path`: a key of its section, unless another section has a nearer one."""
    section, _, name = path.rpartition(".")
    same = {key.path: key.name for key in keys().values() if key.path.rpartition(".")[0] == section}
    elsewhere = [(key.path, key.name) for key in keys().values()] + [(s.name, s.name) for s in sections() if s.name]
    elsewhere += [(alias.keys[0], alias.name) for alias in ALIASES]
    ranked = [(_similarity(name, candidate), key) for key, candidate in same.items()]
    ranked += [(_similarity(name, candidate) - HANDICAP, key) for key, candidate in elsewhere]
    best, key = max(ranked)
    if best >= CUTOFF:
        return f"did you mean {key}?"
    return f"there are: {names(same)}" if same else f"sections: {names(s.name for s in sections() if s.name)}"


def nearest_flag(flag: str, more: Iterable[str]) -> str | None:
    """The valid flag most like `flag` (both without dashes in front): a full path, a last component, or an alias."""
    candidates = {path: path for path in settable()} | {alias.name: alias.name for alias in ALIASES}
    candidates |= {name: name for name in more}
    if "." not in flag:
        candidates |= {path: path.rpartition(".")[2] for path in settable()}
    best, _, name = max((_similarity(flag, text), -len(name), name) for name, text in candidates.items())
    return name if best >= CUTOFF else None


def _similarity(left: str, right: str) -> float:
    return SequenceMatcher(None, _plain(left), _plain(right)).ratio()


def _plain(text: str) -> str:
    return text.lower().replace("-", "_")
