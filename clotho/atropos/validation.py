"""What a group from an environment must be, field by field: the checks that need nothing but the group itself.

What a teacher would say: of each trained token of a group, as many alternatives everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from clotho.atropos.wire import Integer, Override, Parameters, Refused, WireGroup, decode
from protocols.rollout import TeacherTokens
from protocols.sampling import MAX_TEMPERATURE, MIN_LEARNABLE_TEMPERATURE

MASKED = -100
MOST_SEQUENCES = 1024
LARGEST = 1e9
"""Of scores and advantages: beyond, float32 has no room for the squares that statistics take."""
LOWEST, HIGHEST = -9999.0, 1e-3
"""Of log-probabilities: below, nothing is ever sampled; above 0 only by rounding."""
"""Temperatures that the learner can evaluate: at lower ones a choice is greedy in float32, and its gradient none."""
LONGEST_IMAGES = 1024

Rows = list[NDArray[np.float64]]


class Bounds(Struct, frozen=True, kw_only=True):
    """Of the policy: how many tokens there are, and how many a sequence may have."""

    vocab_size: int
    context_length: int


class CheckedGroup(NamedTuple):
    """A group whose fields fit together. Lists have one entry per sequence, arrays one per token.

    common: tokens that all sequences begin with, before anything is trained; at least one.
    trained: what the policy drew; never the first token, which nothing predicts. Everything per token is 0 elsewhere.
    advantages, reference, behaviour: [] where the group has none. temperatures: None where it does not say.
    """

    token: list[NDArray[np.int32]]
    trained: list[NDArray[np.bool_]]
    common: int
    rewards: tuple[float, ...]
    advantages: Rows
    reference: Rows
    behaviour: Rows
    temperatures: list[float | None]
    zero_advantage: tuple[bool, ...]


def check(group: WireGroup, bounds: Bounds) -> CheckedGroup:
    """Check every field of a group but the teacher's; raises Refused."""
    _refuse_images(group.images)
    token = _tokens(group.tokens, bounds)
    trained = _trained(group.masks, token)
    overrides = _overrides(group, len(token))
    return CheckedGroup(
        token=token,
        trained=trained,
        common=_common(token, trained),
        rewards=_scores(group.scores, len(token)),
        advantages=_numbers("advantages", group.advantages, trained, -LARGEST, LARGEST),
        reference=_logprobs("ref_logprobs", group.ref_logprobs, trained),
        behaviour=_logprobs("inference_logprobs", group.inference_logprobs, trained),
        temperatures=_temperatures(group, overrides),
        zero_advantage=tuple(bool(one and one.set_advantage_to_zero) for one in overrides),
    )


def refuse_other_lengths(field: str, rows: Sequence[Sequence[Any]], token: Sequence[NDArray[Any]]) -> None:
    """Raise Refused unless there is one row for each sequence, with one entry for each of its tokens."""
    if len(rows) != len(token):
        raise Refused(f"{field}: {len(rows)} rows for {len(token)} sequences")
    for i, (row, token_T) in enumerate(zip(rows, token, strict=True)):
        if len(row) != token_T.size:
            raise Refused(f"{field}[{i}]: {len(row)} entries for {token_T.size} tokens")


def first(where: NDArray[np.bool_]) -> int | None:
    """Return the first index that is so."""
    return int(where.argmax()) if where.any() else None


def _tokens(rows: list[list[int]], bounds: Bounds) -> list[NDArray[np.int32]]:
    if not 1 <= len(rows) <= MOST_SEQUENCES:
        raise Refused(f"tokens: {len(rows)} sequences; 1 to {MOST_SEQUENCES} are possible")
    token = []
    for i, row in enumerate(rows):
        if not 2 <= len(row) <= bounds.context_length:
            raise Refused(f"tokens[{i}]: {len(row)} tokens; the policy reads 2 to {bounds.context_length}")
        token_T = np.array(row, dtype=np.int32)
        if (t := first((token_T < 0) | (token_T >= bounds.vocab_size))) is not None:
            raise Refused(f"tokens[{i}][{t}]: {row[t]} is not a token; they are below {bounds.vocab_size}")
        token.append(token_T)
    return token


def _trained(rows: list[list[int]], token: list[NDArray[np.int32]]) -> list[NDArray[np.bool_]]:
    refuse_other_lengths("masks", rows, token)
    trained = []
    for i, (row, token_T) in enumerate(zip(rows, token, strict=True)):
        label_T = np.array(row, dtype=np.int32)
        trained_T = label_T != MASKED
        if (t := first(trained_T & (label_T != token_T))) is not None:
            raise Refused(f"masks[{i}][{t}]: {row[t]} is neither -100 nor the token {token_T[t]} (labels, not 0/1)")
        trained_T[0] = False
        trained.append(trained_T)
    if not any(trained_T.any() for trained_T in trained):
        raise Refused("masks: no token is trained")
    return trained


def _common(token: list[NDArray[np.int32]], trained: list[NDArray[np.bool_]]) -> int:
    """How many tokens all sequences begin with, none of them trained in any."""
    starts = [first(trained_T) for trained_T in trained]
    length = min(token_T.size if start is None else start for token_T, start in zip(token, starts, strict=True))
    for token_T in token[1:]:
        differs = first(token_T[:length] != token[0][:length])
        length = length if differs is None else differs
    if not length:
        raise Refused("tokens: the sequences do not begin with the same token")
    return length


def _scores(scores: list[float], sequences: int) -> tuple[float, ...]:
    if len(scores) != sequences:
        raise Refused(f"scores: {len(scores)} for {sequences} sequences")
    for i, score in enumerate(scores):
        if not abs(score) <= LARGEST:
            raise Refused(f"scores[{i}]: {score:g} is beyond {LARGEST:g}")
    return tuple(scores)


def _numbers(
    field: str, rows: list[list[float]] | None, trained: list[NDArray[np.bool_]], low: float, high: float
) -> Rows:
    """Rows of numbers, each within bounds where it is trained and 0 elsewhere."""
    if not rows:
        return []
    refuse_other_lengths(field, rows, trained)
    numbers = []
    for i, (row, trained_T) in enumerate(zip(rows, trained, strict=True)):
        number_T = np.where(trained_T, np.array(row, dtype=np.float64), 0.0)
        if (t := first(~((number_T >= low) & (number_T <= high)))) is not None:
            raise Refused(f"{field}[{i}][{t}]: {row[t]:g} is not between {low:g} and {high:g}")
        numbers.append(number_T)
    return numbers


def _logprobs(field: str, rows: list[list[float]] | None, trained: list[NDArray[np.bool_]]) -> Rows:
    for i, t in _marks(rows or [], trained):
        raise Refused(f"{field}[{i}][{t}]: 1.0 marks a masked token, and masks[{i}][{t}] trains it")
    return [np.minimum(number_T, 0.0) for number_T in _numbers(field, rows, trained, LOWEST, HIGHEST)]


def _marks(rows: list[list[float]], trained: list[NDArray[np.bool_]]) -> Iterator[tuple[int, int]]:
    """Where a trained token has what marks a masked one."""
    for i, (row, trained_T) in enumerate(zip(rows, trained, strict=False)):
        number_T = np.array(row[: trained_T.size], dtype=np.float64)
        if (t := first(trained_T[: number_T.size] & (number_T == 1.0))) is not None:
            yield i, t


def _overrides(group: WireGroup, sequences: int) -> list[Override | None]:
    if not group.overrides:
        return [None] * sequences
    if len(group.overrides) != sequences:
        raise Refused(f"overrides: {len(group.overrides)} for {sequences} sequences")
    return group.overrides


def _temperatures(group: WireGroup, overrides: list[Override | None]) -> list[float | None]:
    """An override goes before `generation_params`, and that before `group_overrides`."""
    of_group = _temperature("group_overrides", group.group_overrides)
    stated = _temperature("generation_params", group.generation_params)
    common = of_group if stated is None else stated
    own = [_temperature(f"overrides[{i}]", override) for i, override in enumerate(overrides)]
    return [common if temperature is None else temperature for temperature in own]


def _temperature(field: str, parameters: Parameters | None) -> float | None:
    temperature = parameters.temperature if parameters else None
    if temperature is not None and not MIN_LEARNABLE_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise Refused(
            f"{field}.temperature: {temperature:g}; {MIN_LEARNABLE_TEMPERATURE:g} to {MAX_TEMPERATURE:g} are possible"
        )
    return temperature


def _refuse_images(images: Raw) -> None:
    """A list of nothings has no image either."""
    content = bytes(images)
    if len(content) <= LONGEST_IMAGES:
        try:
            value = msgspec.json.decode(content)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            value = content
        if not value or (isinstance(value, list) and not any(value)):
            return
    raise Refused("images: the policy reads text only")


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
