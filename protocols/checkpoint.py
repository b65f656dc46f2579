"""What a checkpoint says about the run beside its tensors."""

from __future__ import annotations

from msgspec import Struct

from protocols.alarms import AlarmState
from protocols.ledger import LedgerState


class RunState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run after `step` consumed batches; with the tensors, all that a resumed run needs.

    version, fingerprint: of the weights. ledger: how every group so far ended; the others are asked again.
    asked: groups asked so far. random_state: of the compute thread, as 32-bit integers.
    bad_steps: updates in a row that were not finite. train_seconds: inside updates, over all lives of the run.
    sampled_tokens, trained_tokens: completion tokens over all lives of the run.
    alarms: what they remember; rollbacks: how often the policy was sent back.
    received: groups so far from each environment; under_way: of those that had not ended, by number, the environment.
    inputs: fingerprints of what the run reads (`model`, `tokenizer`, `dataset`): a resumed run must read the same.
    """

    step: int
    version: int
    fingerprint: str
    ledger: LedgerState
    asked: int
    random_state: tuple[int, ...]
    bad_steps: int
    train_seconds: float
    sampled_tokens: int
    trained_tokens: int
    inputs: dict[str, str]
    alarms: AlarmState = AlarmState()
    rollbacks: int = 0
    received: dict[str, int] = {}
    under_way: dict[int, str] = {}
