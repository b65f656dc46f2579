"""A simulated customer with a calculator's tools, for `agent.environment`. Uses only the standard library.

The task has the form of tau-bench: the policy learns what the customer wants over several messages, calls tools, and is
rewarded for the state at the end. A program is in the place of the language model that plays the customer.
"""

from __future__ import annotations

import re

from profiles.environments.calculator import Tools

NUMBER = re.compile(r"-?\d{1,9}")


class Customer(Tools):
    """A customer who changes an amount step by step: 1 for the right amount after the last change.

    The customer believes each number that the policy names, and asks for the next change of it. A message that is no
    number ends the episode.
    """

    def reset(self, answer: str, changes: list[str]) -> None:
        """Begin an episode. The prompt is the first question; `changes` are those that follow, such as "minus 12"."""
        self._answer, self._changes, self.reward = answer, list(changes), 0.0

    def step(self, text: str) -> str | None:
        """Return the next question of the customer, or None if there is none."""
        amount = text.strip()
        if self._changes and NUMBER.fullmatch(amount):
            return f"What is {amount} {self._changes.pop(0)}?"
        self.reward = float(not self._changes and amount == self._answer)
        return None
