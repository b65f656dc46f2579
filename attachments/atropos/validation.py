"""The JSON format of a group from an Atropos environment, and the validation of every field.

Types are strict; unknown fields are ignored. Each group of a batch is decoded separately, so that a malformed group
does not affect the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from numpy.typing import NDArray

from protocols.errors import visible
from protocols.learnability import MIN_LEARNABLE_TEMPERATURE
from protocols.rollout import MAX_GROUP_REWARD, TeacherTokens
from protocols.sampling import MAX_LOGPROB, MAX_TEMPERATURE, MIN_LOGPROB

MASKED = -100
MAX_SEQUENCES = 1024
MAX_MAGNITUDE = MAX_GROUP_REWARD
"""Limit of scores and advantages."""
MAX_IMAGES_BYTES = 1024

MAX_DETAIL = 80


class InvalidGroup(Exception):
    """A group that cannot be trained on. The message is one short line that names the field and the index."""


Integer = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
T = TypeVar("T")
ABSENT = Raw(b"null")


class Parameters(Struct, frozen=True, kw_only=True):
    """Sampling parameters of a group (`generation_params`, `group_overrides`)."""

    temperature: float | None = None


class Override(Parameters, frozen=True, kw_only=True):
    """Sampling parameters of one sequence. set_advantage_to_zero: do not train on the sequence."""

    set_advantage_to_zero: bool | None = None


class WireGroup(Struct, frozen=True, kw_only=True):
    """One group of G sequences with T tokens each. For an optional field, [] is equal to null.

    masks: the token if it is trained on, otherwise -100. inference_logprobs: 1.0 for tokens that are not trained on.
    distill_token_ids, distill_logprobs: [G][T][K], decoded only if they are used. images: any JSON value.
    """

    tokens: list[list[Integer]]
    masks: list[list[Integer]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    generation_params: Parameters | None = None
    group_overrides: Parameters | None = None
    overrides: list[Override | None] | None = None
    env_id: int | None = None
    images: Raw = ABSENT
    distill_token_ids: Raw = ABSENT
    distill_logprobs: Raw = ABSENT


class _EnvironmentId(Struct, frozen=True, kw_only=True):
    env_id: int | None = None


def decode_group(raw: Raw) -> WireGroup:
    """Decode one group. Raises InvalidGroup."""
    return decode(raw, WireGroup, "")


def environment_id(raw: Raw) -> int | None:
    """Return `env_id` of a group whose other fields may be malformed."""
    try:
        return msgspec.json.decode(raw, type=_EnvironmentId).env_id
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def decode(raw: Raw, kind: type[T], field: str) -> T:
    """Decode a field of a group, or the whole group if `field` is empty. Raises InvalidGroup."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        message, _, path = str(error).partition(" - at ")
        place = (field + path.strip("`").removeprefix("$")).removeprefix(".")
        raise InvalidGroup(visible(f"{place or 'the group'}: {message}", MAX_DETAIL)) from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise InvalidGroup(
            visible(f"{field or 'the group'} is not valid JSON ({type(error).__name__})", MAX_DETAIL)
        ) from error


Rows = list[NDArray[np.float64]]


class Bounds(Struct, frozen=True, kw_only=True):
    """Limits of the policy: size of the vocabulary, and maximum number of tokens of a sequence."""

    vocab_size: int
    context_length: int


class CheckedGroup(NamedTuple):
    """A group with consistent fields. Lists have one entry per sequence, arrays one entry per token.

    common: length of the common prefix of all sequences without trained tokens; at least 1.
    trained: True for tokens that the policy sampled; never the first token, which has no context.
    advantages, reference, rollout: [] if the group has none; 0 for tokens that are not trained on.
    temperatures: None if the group does not contain one.
    """

    token: list[NDArray[np.int32]]
    trained: list[NDArray[np.bool_]]
    common: int
    rewards: tuple[float, ...]
    advantages: Rows
    reference: Rows
    rollout: Rows
    temperatures: list[float | None]
    zero_advantage: tuple[bool, ...]


def check(group: WireGroup, bounds: Bounds) -> CheckedGroup:
    """Check every field of a group except the teacher's. Raises InvalidGroup."""
    _reject_images(group.images)
    token = _tokens(group.tokens, bounds)
    trained = _trained(group.masks, token)
    overrides = _overrides(group, len(token))
    return CheckedGroup(
        token=token,
        trained=trained,
        common=_common(token, trained),
        rewards=_scores(group.scores, len(token)),
        advantages=_numbers("advantages", group.advantages, trained, -MAX_MAGNITUDE, MAX_MAGNITUDE),
        reference=_logprobs("ref_logprobs", group.ref_logprobs, trained),
        rollout=_logprobs("inference_logprobs", group.inference_logprobs, trained),
        temperatures=_temperatures(group, overrides),
        zero_advantage=tuple(bool(one and one.set_advantage_to_zero) for one in overrides),
    )


def check_lengths(field: str, rows: Sequence[Sequence[Any]], token: Sequence[NDArray[Any]]) -> None:
    """Raise InvalidGroup unless `rows` has one row per sequence and one entry per token."""
    if len(rows) != len(token):
        raise InvalidGroup(f"{field}: {len(rows)} rows for {len(token)} sequences")
    for i, (row, token_T) in enumerate(zip(rows, token, strict=True)):
        if len(row) != token_T.size:
            raise InvalidGroup(f"{field}[{i}]: {len(row)} entries for {token_T.size} tokens")


def first_index(where: NDArray[np.bool_]) -> int | None:
    """Return the index of the first True; None if there is none."""
    return int(where.argmax()) if where.any() else None


def _tokens(rows: list[list[int]], bounds: Bounds) -> list[NDArray[np.int32]]:
    if not 1 <= len(rows) <= MAX_SEQUENCES:
        raise InvalidGroup(f"tokens: {len(rows)} sequences; a group has 1 to {MAX_SEQUENCES}")
    token = []
    for i, row in enumerate(rows):
        if not 2 <= len(row) <= bounds.context_length:
            raise InvalidGroup(f"tokens[{i}]: {len(row)} tokens; a sequence has 2 to {bounds.context_length}")
        token_T = np.array(row, dtype=np.int32)
        if (t := first_index((token_T < 0) | (token_T >= bounds.vocab_size))) is not None:
            raise InvalidGroup(f"tokens[{i}][{t}]: {row[t]} is not a token of the vocabulary of {bounds.vocab_size}")
        token.append(token_T)
    return token


def _trained(rows: list[list[int]], token: list[NDArray[np.int32]]) -> list[NDArray[np.bool_]]:
    check_lengths("masks", rows, token)
    trained = []
    for i, (row, token_T) in enumerate(zip(rows, token, strict=True)):
        label_T = np.array(row, dtype=np.int32)
        trained_T = label_T != MASKED
        if (t := first_index(trained_T & (label_T != token_T))) is not None:
            raise InvalidGroup(
                f"masks[{i}][{t}]: {row[t]} is neither -100 nor the token {token_T[t]} (labels, not 0/1)"
            )
        trained_T[0] = False
        trained.append(trained_T)
    if not any(trained_T.any() for trained_T in trained):
        raise InvalidGroup("masks: no token is trained on")
    return trained


def _common(token: list[NDArray[np.int32]], trained: list[NDArray[np.bool_]]) -> int:
    """Return the length of the common prefix of all sequences that contains no trained token."""
    starts = [first_index(trained_T) for trained_T in trained]
    length = min(token_T.size if start is None else start for token_T, start in zip(token, starts, strict=True))
    for token_T in token[1:]:
        differs = first_index(token_T[:length] != token[0][:length])
        length = length if differs is None else differs
    if not length:
        raise InvalidGroup("tokens: the sequences do not begin with the same token")
    return length


def _scores(scores: list[float], sequences: int) -> tuple[float, ...]:
    if len(scores) != sequences:
        raise InvalidGroup(f"scores: {len(scores)} for {sequences} sequences")
    for i, score in enumerate(scores):
        if not abs(score) <= MAX_MAGNITUDE:
            raise InvalidGroup(f"scores[{i}]: {score:g} is not between {-MAX_MAGNITUDE:g} and {MAX_MAGNITUDE:g}")
    return tuple(scores)


def _numbers(
    field: str, rows: list[list[float]] | None, trained: list[NDArray[np.bool_]], low: float, high: float
) -> Rows:
    """Return rows of numbers, checked for trained tokens and 0 for other tokens."""
    if not rows:
        return []
    check_lengths(field, rows, trained)
    numbers = []
    for i, (row, trained_T) in enumerate(zip(rows, trained, strict=True)):
        number_T = np.where(trained_T, np.array(row, dtype=np.float64), 0.0)
        if (t := first_index(~((number_T >= low) & (number_T <= high)))) is not None:
            raise InvalidGroup(f"{field}[{i}][{t}]: {row[t]:g} is not between {low:g} and {high:g}")
        numbers.append(number_T)
    return numbers


def _logprobs(field: str, rows: list[list[float]] | None, trained: list[NDArray[np.bool_]]) -> Rows:
    for i, t in _marks(rows or [], trained):
        raise InvalidGroup(f"{field}[{i}][{t}]: 1.0 marks a masked token, but masks[{i}][{t}] is trained on")
    return [np.minimum(number_T, 0.0) for number_T in _numbers(field, rows, trained, MIN_LOGPROB, MAX_LOGPROB)]


def _marks(rows: list[list[float]], trained: list[NDArray[np.bool_]]) -> Iterator[tuple[int, int]]:
    """Yield the positions of trained tokens whose value is 1.0, which marks a masked token."""
    for i, (row, trained_T) in enumerate(zip(rows, trained, strict=False)):
        number_T = np.array(row[: trained_T.size], dtype=np.float64)
        if (t := first_index(trained_T[: number_T.size] & (number_T == 1.0))) is not None:
            yield i, t


def _overrides(group: WireGroup, sequences: int) -> list[Override | None]:
    if not group.overrides:
        return [None] * sequences
    if len(group.overrides) != sequences:
        raise InvalidGroup(f"overrides: {len(group.overrides)} for {sequences} sequences")
    return group.overrides


def _temperatures(group: WireGroup, overrides: list[Override | None]) -> list[float | None]:
    """Return the temperatures. `overrides` have precedence over `generation_params`, these over `group_overrides`."""
    of_group = _temperature("group_overrides", group.group_overrides)
    stated = _temperature("generation_params", group.generation_params)
    common = of_group if stated is None else stated
    own = [_temperature(f"overrides[{i}]", override) for i, override in enumerate(overrides)]
    return [common if temperature is None else temperature for temperature in own]


def _temperature(field: str, parameters: Parameters | None) -> float | None:
    temperature = parameters.temperature if parameters else None
    if temperature is not None and not MIN_LEARNABLE_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InvalidGroup(
            f"{field}.temperature: {temperature:g} is not between {MIN_LEARNABLE_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
        )
    return temperature


def _reject_images(images: Raw) -> None:
    """Raise InvalidGroup if there is an image; a list of empty values contains none."""
    content = bytes(images)
    if len(content) <= MAX_IMAGES_BYTES:
        try:
            value = msgspec.json.decode(content)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            value = content
        if not value or (isinstance(value, list) and not any(value)):
            return
    raise InvalidGroup("images: not supported; the policy accepts text only")


MAX_ALTERNATIVES = 256
EMPTY = (b"null", b"[]")


def teacher_tokens(group: WireGroup, checked: CheckedGroup, vocab_size: int) -> tuple[TeacherTokens, ...]:
    """Return the teacher's log-probabilities for the tokens after `common`; () if there are none. Raises InvalidGroup.

    K is the smallest number of alternatives at any trained token. Longer rows are reduced to their K most probable
    tokens, because servers add the sampled token to their K best. Rows of other tokens are ignored.
    """
    present = [bytes(field) not in EMPTY for field in (group.distill_token_ids, group.distill_logprobs)]
    if not any(present):
        return ()
    if not all(present):
        raise InvalidGroup("distill_token_ids and distill_logprobs: set both or none")
    ids = decode(group.distill_token_ids, list[list[list[Integer]]], "distill_token_ids")
    numbers = decode(group.distill_logprobs, list[list[list[float]]], "distill_logprobs")
    check_lengths("distill_token_ids", ids, checked.token)
    check_lengths("distill_logprobs", numbers, checked.token)
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
    if not 1 <= len(ids) <= MAX_ALTERNATIVES:
        raise InvalidGroup(f"distill_token_ids[{i}][{t}]: {len(ids)} tokens; a row has 1 to {MAX_ALTERNATIVES}")
    if len(numbers) != len(ids):
        raise InvalidGroup(f"distill_logprobs[{i}][{t}]: {len(numbers)} numbers for {len(ids)} tokens")
    if len(set(ids)) != len(ids):
        raise InvalidGroup(f"distill_token_ids[{i}][{t}]: contains a token twice")


def _check_values(
    i: int,
    token_T_K: NDArray[np.int32],
    logprob_T_K: NDArray[np.float64],
    trained_T: NDArray[np.bool_],
    vocab_size: int,
) -> None:
    if (t := first_index(np.any((token_T_K < 0) | (token_T_K >= vocab_size), axis=1))) is not None:
        raise InvalidGroup(
            f"distill_token_ids[{i}][{t}]: contains a token that is not in the vocabulary of {vocab_size}"
        )
    within_T = np.all((logprob_T_K >= MIN_LOGPROB) & (logprob_T_K <= MAX_LOGPROB), axis=1)
    if (t := first_index(trained_T & ~within_T)) is not None:
        raise InvalidGroup(
            f"distill_logprobs[{i}][{t}]: contains a value that is not between {MIN_LOGPROB:g} and {MAX_LOGPROB:g}"
        )


def _rows(value_T_K: NDArray[Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, value_T_K.tolist()))
