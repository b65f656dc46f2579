"""What a teacher would say: of each trained token of a group, as many alternatives everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clotho.atropos.refusal import Refused
from clotho.atropos.validation import HIGHEST, LOWEST, CheckedGroup, first, refuse_other_lengths
from clotho.atropos.wire import Integer, WireGroup, decode
from protocols.score import TeacherTokens

MOST_ALTERNATIVES = 256
NOTHING = (b"null", b"[]")


def teacher_tokens(group: WireGroup, checked: CheckedGroup, vocab_size: int) -> tuple[TeacherTokens, ...]:
    """Read a group's teacher, of the tokens after `common`; () where it has none. Raises Refused.

    K is the smallest number of alternatives at any trained token (servers add the token that stands there to their K
    best where it is not among them); of rows with more, the least probable are left out. Other rows are not looked at.
    """
    given = [bytes(field) not in NOTHING for field in (group.distill_token_ids, group.distill_logprobs)]
    if not any(given):
        return ()
    if not all(given):
        raise Refused("distill_token_ids and distill_logprobs: one is missing")
    ids = decode(group.distill_token_ids, list[list[list[Integer]]], "distill_token_ids")
    numbers = decode(group.distill_logprobs, list[list[list[float]]], "distill_logprobs")
    refuse_other_lengths("distill_token_ids", ids, checked.token)
    refuse_other_lengths("distill_logprobs", numbers, checked.token)
    places = [(i, t) for i, trained_T in enumerate(checked.trained) for t in np.flatnonzero(trained_T).tolist()]
    for i, t in places:
        _check_row(i, t, ids[i][t], numbers[i][t])
    count = min(len(ids[i][t]) for i, t in places)
    token = [np.zeros((token_T.size, count), dtype=np.int32) for token_T in checked.token]
    logprob = [np.zeros((token_T.size, count)) for token_T in checked.token]
    for i, t in places:
        best = sorted(zip(numbers[i][t], ids[i][t], strict=True), key=lambda pair: -pair[0])[:count]
        logprob[i][t], token[i][t] = zip(*best, strict=True)
    for i, (token_T_K, logprob_T_K) in enumerate(zip(token, logprob, strict=True)):
        _check_values(i, token_T_K, logprob_T_K, checked.trained[i], vocab_size)
    return tuple(
        TeacherTokens(
            tokens=_rows(token_T_K[checked.common :]), logprobs=_rows(np.minimum(logprob_T_K, 0.0)[checked.common :])
        )
        for token_T_K, logprob_T_K in zip(token, logprob, strict=True)
    )


def _check_row(i: int, t: int, ids: list[int], numbers: list[float]) -> None:
    if not 1 <= len(ids) <= MOST_ALTERNATIVES:
        raise Refused(f"distill_token_ids[{i}][{t}]: {len(ids)} tokens; 1 to {MOST_ALTERNATIVES} are possible")
    if len(numbers) != len(ids):
        raise Refused(f"distill_logprobs[{i}][{t}]: {len(numbers)} numbers for {len(ids)} tokens")
    if len(set(ids)) != len(ids):
        raise Refused(f"distill_token_ids[{i}][{t}]: a token stands there twice")


def _check_values(
    i: int,
    token_T_K: NDArray[np.int32],
    logprob_T_K: NDArray[np.float64],
    trained_T: NDArray[np.bool_],
    vocab_size: int,
) -> None:
    if (t := first(np.any((token_T_K < 0) | (token_T_K >= vocab_size), axis=1))) is not None:
        raise Refused(f"distill_token_ids[{i}][{t}]: not all are tokens; they are below {vocab_size}")
    within_T = np.all((logprob_T_K >= LOWEST) & (logprob_T_K <= HIGHEST), axis=1)
    if (t := first(trained_T & ~within_T)) is not None:
        raise Refused(f"distill_logprobs[{i}][{t}]: not all are between {LOWEST:g} and {HIGHEST:g}")


def _rows(value_T_K: NDArray[Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, value_T_K.tolist()))
