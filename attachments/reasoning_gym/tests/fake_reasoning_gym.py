"""A stand-in for the library Reasoning Gym with four of its datasets, for tests that import it as `reasoning_gym`.

`attachments/reasoning_gym/tests/test_gym_library.py` checks the same rules with it and with the library.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np

from attachments.reasoning_gym.gym_library import library


@dataclass
class Digits:
    """Configuration of `chain_sum`."""

    min_digits: int = 1
    max_digits: int = 4
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Assert that the values are possible, as the library does."""
        assert self.min_digits > 0, "min_digits must be positive"
        assert self.max_digits >= self.min_digits, "max_digits must be >= min_digits"


@dataclass
class Sized:
    """A configuration without settings."""

    seed: int | None = None
    size: int = 500


class Style(StrEnum):
    """A setting that the library compares with the members of an enumeration."""

    PLAIN = "plain"
    WORDS = "words"


@dataclass
class Styled:
    """Configuration of `styled`, whose lists and texts must become tuples and members."""

    styles: tuple[Style, ...] = (Style.PLAIN,)
    first: Style = Style.PLAIN
    seed: int | None = None
    size: int = 500


class ChainSum:
    """Sums of two numbers. Its generator uses Python's global random state."""

    def __init__(self, config: Digits) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        one, other = (random.randrange(10**self.config.max_digits) for _ in range(2))
        difficulty = {"num_digits": (self.config.min_digits, self.config.max_digits)}
        metadata = {"source_index": index, "difficulty": difficulty}
        return {"question": f"{one} + {other} =", "answer": str(one + other), "metadata": metadata}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """Return 1 for the sum."""
        return float(answer == entry["answer"])


class ComplexArithmetic:
    """Its scorer compares the answer with a tuple of the metadata. NumPy's global random state generates it."""

    def __init__(self, config: Sized) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        result = tuple(int(number) for number in np.random.randint(0, 99, size=2))
        metadata = {"result": result, "difficulty": {}}
        return {"question": f"{index}: a + b i?", "answer": f"{result[0]} + {result[1]}i", "metadata": metadata}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """Return 1 for the number of the metadata, which JSON would turn into a list."""
        result = entry["metadata"]["result"]
        assert isinstance(result, tuple)
        return float(answer == "{} + {}i".format(*result))


class Acre:
    """Three problems, whatever the size; no example of an answer, and no curriculum."""

    def __init__(self, config: Sized) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": ["a", "b", "c"][index], "answer": None}


class StyledWords:
    """Refuses everything but the types of its configuration."""

    def __init__(self, config: Styled) -> None:
        if not isinstance(config.first, Style) or not all(isinstance(style, Style) for style in config.styles):
            raise TypeError("a style is a member of Style")
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise ValueError(f"no word of {len(self.config.styles)} styles")


class DigitsCurriculum:
    """Levels 0 to 2 of `chain_sum`."""

    attributes: ClassVar = {"num_digits": SimpleNamespace(levels=[1, 2, 3])}

    def set_global_level(self, level: int) -> None:
        """Choose a level."""
        self.level = level

    def generate_configuration(self) -> Digits:
        """Return a configuration whose range ends at the level."""
        return Digits(max_digits=self.attributes["num_digits"].levels[self.level])


DATASETS = {
    "chain_sum": (ChainSum, Digits),
    "complex_arithmetic": (ComplexArithmetic, Sized),
    "acre": (Acre, Sized),
    "styled": (StyledWords, Styled),
    "composite": (None, Sized),
}


@contextmanager
def installed() -> Iterator[None]:
    """Import this stand-in as `reasoning_gym` within the block."""
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    vars(factory).update(DATASETS=DATASETS, CURRICULA={"chain_sum": DigitsCurriculum})
    with patch.dict(sys.modules, {package.__name__: package, factory.__name__: factory}):
        library.cache_clear()
        try:
            yield
        finally:
            library.cache_clear()
