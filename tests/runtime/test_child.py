"""The policies a child can have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clotho.runtime.child import Child, Restart, RestartBudget, permanent, temporary, transient


class _Idle:
    name = "idle"

    async def run(self) -> None:
        """Do nothing."""


def test_restarts_beyond_the_intensity_are_refused_and_old_ones_forgotten() -> None:
    """At most 2 within 10 seconds, over a sliding window."""
    budget = RestartBudget(2, 10.0)
    assert [budget.spend(now) for now in (0.0, 6.0, 9.0, 10.0, 15.0, 16.0)] == [True, True, False, True, False, True]


def test_no_restart_is_forgiven_unless_it_was_granted() -> None:
    """The default of every child is to fail at the first failure."""
    assert not RestartBudget(0, 10.0).spend(0.0)
    assert [child(_Idle()).max_restarts for child in (permanent, transient, temporary)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Child(actor=_Idle(), restart=Restart.TEMPORARY, max_restarts=1), "never restarted"),
        (lambda: transient(_Idle(), make=_Idle), "would have no effect"),
        (lambda: Child(actor=_Idle(), restart=Restart.TRANSIENT, ends_with_input=True), "is for temporary ones"),
        (lambda: permanent(_Idle(), max_restarts=-1), "N >= 0"),
        (lambda: permanent(_Idle(), within_seconds=0), "S > 0"),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(make: Callable[[], Child], complaint: str) -> None:
    """No option without effect; the message names the child."""
    with pytest.raises(ValueError, match=f"child 'idle'.*{complaint}"):
        make()
