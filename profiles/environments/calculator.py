"""A calculator with three tools, for `agent.environment`. Uses only the standard library."""

from __future__ import annotations


class Tools:
    """Three tools that keep nothing."""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b

    def subtract(self, a: int, b: int) -> int:
        """Subtract the second number from the first.

        Args:
            a: The first number.
            b: The second number.
        """
        return a - b


class Calculator(Tools):
    """One problem of one or two operations: 1 for the right number in the message that ends the episode."""

    def reset(self, answer: str) -> None:
        """Begin an episode. The prompt is the question."""
        self._answer, self.reward = answer, 0.0

    def step(self, text: str) -> None:
        """Compare a message without calls with the answer. This ends the episode."""
        self.reward = float(text.strip() == self._answer)
