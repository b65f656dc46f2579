"""The sessions of HTTP clients: what was sampled in them, their rewards, and how each of them ends."""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog
from msgspec import Struct, structs
from starlette.requests import Request

from attachments.sessions.groups import MAX_NAMES, Member, SessionGroups
from attachments.sessions.posts import Rewarded, RewardPost
from attachments.sessions.rows import SessionAnswer, SessionRow, trajectories
from attachments.sessions.sections import HttpSessions
from clotho.serving.auth import Client, client_of
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.services import Recording, Tokenizer
from protocols.accounting import Balance
from protocols.learnability import unlearnable_completion
from protocols.sampling import POLICY, Completion, SampleRequest

SESSION_HEADER, RECEIPT_HEADER = "x-clotho-session", "x-clotho-receipt"
NAME = re.compile(r"[\x21-\x7e]{1,256}")
UNFINISHED = "it has not ended, or was aborted"

STATUS = {"unknown": 404, "foreign": 403, "late": 410, "restarted": 410}
"""Why a post or a request is refused -> HTTP status; of other reasons 409."""

FINAL = {"x-should-retry": "false"}
"""Header of refusals: clients of OpenAI and Anthropic would repeat a request with status 409."""

log = structlog.get_logger(actor="server")


class _Metadata(Struct, frozen=True, kw_only=True):
    """The field of a request of Anthropic that names who asks."""

    user_id: str | None = None


class _User(Struct, frozen=True, kw_only=True):
    """The fields of a request that name who asks. user: of OpenAI."""

    user: str | None = None
    metadata: _Metadata | None = None

    @property
    def name(self) -> str:
        """The name; empty if there is none."""
        return self.user or (self.metadata and self.metadata.user_id) or ""


class Session:
    """One session.

    owner: name of the API key that began it; empty for administrators. answers: each answer, or why it cannot be
    trained on. rewarded: indexes of answers with rewards of their own. touched: time of the last request.
    end: empty while the session is open; `rewarded`, or why it was dropped. in_groups: members that have not ended.
    trained, reason: of those that have: whether one was trained on, and why the last one was not.
    """

    def __init__(self, name: str, serial: int, owner: str) -> None:
        self.name, self.serial, self.owner = name, serial, owner
        self.answers: list[SessionAnswer | str] = []
        self.rows: list[SessionRow] = []
        self.rewarded: set[int] = set()
        self.touched, self.end = 0.0, ""
        self.in_groups, self.trained, self.reason = 0, False, ""

    @property
    def left(self) -> list[SessionAnswer]:
        """The answers that can be trained on and have no reward of their own."""
        return [
            one
            for index, one in enumerate(self.answers)
            if isinstance(one, SessionAnswer) and index not in self.rewarded
        ]


class SessionCounts(Struct, kw_only=True):
    """What has happened since the process was started.

    rewarded: rewards that were accepted. forked: rows beyond the first of a session. untrainable: answers that cannot
    be trained on. refused: posts and requests, by reason.
    """

    rewarded: int = 0
    forked: int = 0
    untrainable: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter)


class RewardTarget(NamedTuple):
    """What one reward is for. indexes: of the answers; None: all that have no reward of their own, which ends it."""

    session: Session
    indexes: tuple[int, ...] | None
    reward: float


class Sessions:
    """All sessions of a run since it was started; records the completions of its server. Used from one event loop.

    A session is named by the header `X-Clotho-Session`, else by the field `user` or `metadata.user_id` of the body,
    else by the label of the API key. Each of its answers has a receipt, `LIFE-SESSION-ANSWER`: what was begun by an
    earlier start of the run is gone. counts: since the start. begun, trained, dropped: of all sessions since the run
    began.
    """

    def __init__(
        self,
        settings: HttpSessions,
        groups: SessionGroups,
        *,
        life: str,
        tokenizer: Tokenizer,
        context_length: int,
        logit_bias: Sequence[tuple[int, float]] = (),
        saved: Balance | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """life: name of this start of the run. context_length: of the policy. logit_bias: of the run.

        saved: of the checkpoint.
        """
        self._settings, self._groups, self._life = settings, groups, life
        self._tokenizer, self._context = tokenizer, context_length
        self._bias, self._clock = logit_bias, clock
        self.begun, self.trained, self.dropped = 0, 0, Counter[str]()
        if saved is not None:
            self.begun, self.trained, self.dropped = saved.prompted, saved.trained, Counter(saved.by_reason)
            self.dropped["lost"] += saved.carried_over
        self.counts = SessionCounts()
        self._named: dict[str, Session] = {}
        self._by_serial: dict[int, Session] = {}
        self._open: OrderedDict[int, Session] = OrderedDict()  # that idle longest first
        self._kept = 0

    @property
    def open(self) -> int:
        """Number of sessions without a reward."""
        self._expire()
        return len(self._open)

    async def begin(self, http: Request, samples: Sequence[SampleRequest]) -> Recording:
        """Begin an answer if the request names a session. Raises ApiError if the session takes none."""
        client = client_of(http.scope)
        name = await _session_name(http, client)
        if not name or not samples:
            return Recording(remember=lambda request, completion: None)
        if sum(len(sample.seeds) for sample in samples) != 1:
            raise invalid_field("n", f"must be 1, with one prompt, in the session '{name}': each answer has a receipt")
        self._expire()
        session = self._named.get(name) or self._new(name, client.owner)
        self._require_owner(session, client)
        if session.end:
            text = f"The session '{name}' has ended ({session.end}); begin another one under another name."
            raise self._refused("ended", text, SESSION_HEADER)
        session.answers.append(UNFINISHED)
        self._touch(session)
        index = len(session.answers) - 1
        receipt = f"{self._life}-{session.serial}-{index}"
        return Recording(
            remember=partial(self._remember, session, index),
            headers={RECEIPT_HEADER: receipt},
            samples=(self._as_sampled(session, samples[0]),),
        )

    def _as_sampled(self, session: Session, sample: SampleRequest) -> SampleRequest:
        """Return a request with the tokens of the row that the text of its prompt continues, if they leave room."""
        rows = reversed(session.rows)
        prompt = next(filter(None, (row.as_sampled(sample.prompt, self._tokenizer) for row in rows)), sample.prompt)
        room = min(sample.sampling.max_tokens, self._context - len(prompt))
        if room < 1:
            return sample
        return structs.replace(sample, prompt=prompt, sampling=structs.replace(sample.sampling, max_tokens=room))

    def _new(self, name: str, owner: str) -> Session:
        session = Session(name, self.begun, owner)
        self.begun += 1
        self._named[name] = self._by_serial[session.serial] = self._open[session.serial] = session
        while len(self._open) > self._settings.max_open:
            self._drop(next(iter(self._open.values())), "evicted")
        if len(self._named) > MAX_NAMES + len(self._open):
            oldest = next(one for one in self._named.values() if one.end)
            del self._named[oldest.name], self._by_serial[oldest.serial]
        return session

    def _touch(self, session: Session) -> None:
        session.touched = self._clock()
        self._open.move_to_end(session.serial)

    def _remember(self, session: Session, index: int, request: SampleRequest, completion: Completion) -> None:
        """Add a finished answer to the row that its prompt continues, or to a new one."""
        if session.end or completion.finish_reason == "abort":
            return
        self._touch(session)
        if reason := self._untrainable(request, completion):
            session.answers[index] = reason
            self.counts.untrainable += 1
            return
        row = next((row for row in reversed(session.rows) if row.continues_with(request, completion)), None)
        if row is None:
            row = SessionRow(request, completion)
            self.counts.forked += bool(session.rows)
            session.rows.append(row)
        self._kept -= row.size
        session.answers[index] = row.add(request, completion)
        self._kept += row.size
        self._bound_memory()

    def _untrainable(self, request: SampleRequest, completion: Completion) -> str:
        if request.weights != POLICY:
            return "another model than the policy sampled it"
        longest, size = self._settings.max_tokens, len(request.prompt) + len(completion.tokens)
        if size > longest:
            return f"it ends behind {size} tokens, and sessions.max_tokens is {longest}"
        if not completion.tokens:
            return "it is empty"
        return unlearnable_completion(request, completion, logit_bias=self._bias)

    def _bound_memory(self) -> None:
        while self._kept + self._groups.kept > 2**20 * self._settings.max_kept_mib:
            if self._open:
                self._drop(next(iter(self._open.values())), "evicted")
            elif not self._groups.evict():
                return

    def _expire(self) -> None:
        before = self._clock() - self._settings.reward_seconds
        while self._open and (oldest := next(iter(self._open.values()))).touched < before:
            self._drop(oldest, "unrewarded" if oldest.left or not oldest.answers else "untrainable")
        self._groups.expire(before)

    def _drop(self, session: Session, reason: str) -> None:
        session.reason = session.reason or reason
        self._close(session, reason)

    def _close(self, session: Session, end: str) -> None:
        """Take no more answers and rewards; members keep what they need of the tokens."""
        session.end = end
        del self._open[session.serial]
        self._kept -= sum(row.size for row in session.rows)
        session.rows, session.answers = [], []
        self._count_if_over(session)

    def _count_if_over(self, session: Session) -> None:
        """Count a closed session whose members have all ended: each session is counted once."""
        if not session.end or session.in_groups:
            return
        if session.trained:
            self.trained += 1
        else:
            self.dropped[session.reason] += 1

    def _member_ended(self, session: Session, reason: str) -> None:
        session.in_groups -= 1
        session.trained, session.reason = session.trained or not reason, reason or session.reason
        self._count_if_over(session)

    def reward(self, post: RewardPost, client: Client) -> Rewarded:
        """Accept the rewards of a post, all or none. Raises ApiError with the reason."""
        self._expire()
        targets = self._targets(post, client)
        members = [self._member(target) for target in targets]
        name = post.group or ""
        if text := self._groups.refusal(name, post.scenario, members, closes=post.close):
            raise self._refused("group", f"The post is refused: {text}.", "group")
        for session, indexes, _ in targets:
            session.in_groups += 1
            session.rewarded.update(indexes or ())
            if indexes is None:
                self._close(session, "rewarded")
        self.counts.rewarded += len(targets)
        group = self._groups.add(name, post.scenario, members, close=post.close)
        if post.feedback:
            log.info("session_feedback", sessions=sorted({one.session.name for one in targets}), text=post.feedback)
        self._bound_memory()
        return Rewarded(
            rewarded=len(targets),
            group=post.group,
            members=len(group.members),
            group_size=self._groups.size,
            complete=group.complete,
        )

    def _targets(self, post: RewardPost, client: Client) -> list[RewardTarget]:
        """Return what each reward of a post is for. Raises ApiError if one of them cannot be accepted."""
        if post.session is not None:
            session = self._named.get(post.session)
            if session is None:
                raise self._refused("unknown", f"No session '{post.session}' of this start is known.", "session")
            self._require_owner(session, client)
            self._require_open(session, f"The session '{session.name}'", "session")
            return [RewardTarget(session, None, post.amounts[0])]
        found: list[RewardTarget] = []
        for receipt, reward in zip(post.receipts or (), post.amounts, strict=True):
            target = self._receipt(receipt, reward, client)
            if any(target[:2] == other[:2] for other in found):
                raise self._refused("double", f"The receipt {receipt} is listed twice.", "receipts")
            found.append(target)
        return found

    def _receipt(self, receipt: str, reward: float, client: Client) -> RewardTarget:
        life, *numbers = receipt.split("-")
        if len(numbers) != 2 or not all(number.isdecimal() and len(number) < 19 for number in numbers):
            raise self._refused("unknown", f"'{receipt}' is no receipt.", "receipts")
        if life != self._life:
            text = f"The receipt {receipt} is of an earlier start of the run, whose sessions without a reward are gone."
            raise self._refused("restarted", text, "receipts")
        serial, index = map(int, numbers)
        session = self._by_serial.get(serial)
        if session is None or (not session.end and index >= len(session.answers)):
            raise self._refused("unknown", f"No answer with the receipt {receipt} is known.", "receipts")
        self._require_owner(session, client)
        self._require_open(session, f"The session '{session.name}' of the receipt {receipt}", "receipts")
        if index in session.rewarded:
            raise self._refused("double", f"The receipt {receipt} has its reward.", "receipts")
        return RewardTarget(session, (index,), reward)

    def _require_owner(self, session: Session, client: Client) -> None:
        if not client.is_admin and client.owner != session.owner:
            raise self._refused("foreign", f"The session '{session.name}' belongs to another API key.", "session")

    def _require_open(self, session: Session, subject: str, param: str) -> None:
        if session.end == "rewarded":
            raise self._refused("double", f"{subject} has its reward.", param)
        if session.end:
            limits = "sessions.reward_seconds, sessions.max_open and sessions.max_kept_mib limit what is kept"
            raise self._refused("late", f"{subject} was dropped before this reward ({session.end}): {limits}.", param)

    def _member(self, target: RewardTarget) -> Member:
        """Return what a reward is for as a member of a group. Raises ApiError if nothing can be trained on."""
        session, indexes, reward = target
        answers = session.left if indexes is None else [session.answers[index] for index in indexes]
        kept = [one for one in answers if isinstance(one, SessionAnswer)]
        if not kept:
            why = next((one for one in reversed(answers or session.answers) if isinstance(one, str)), "it has none")
            text = f"No answer of the session '{session.name}' is left to be trained on: {why}."
            raise self._refused("untrainable", text, "session" if indexes is None else "receipts")
        ended = partial(self._member_ended, session)
        return Member(trajectories=trajectories(kept), reward=reward, ended=ended)

    def _refused(self, reason: str, text: str, param: str) -> ApiError:
        self.counts.refused[reason] += 1
        return ApiError(STATUS.get(reason, 409), text, param=param, code=reason, headers=FINAL)

    def waiting_for(self) -> str:
        """Say what the run needs for its next group."""
        return f"rewards of {self.open} open sessions; members of groups: {self._groups.incomplete() or 'none'}"

    def balance(self) -> Balance:
        """Return how the sessions of the run have ended: each is counted once."""
        dropped = self.dropped.total()
        return Balance(
            prompted=self.begun,
            trained=self.trained,
            by_reason=dict(+self.dropped),
            carried_over=self.begun - self.trained - dropped,
        )


async def _session_name(http: Request, client: Client) -> str:
    """Return the name of the session that a request belongs to; empty if it names none. Raises ApiError."""
    name = http.headers.get(SESSION_HEADER)
    if name is None:
        try:
            name = msgspec.json.decode(await http.body(), type=_User).name or client.label
        except msgspec.ValidationError:
            raise invalid_field("user", "or metadata.user_id, names a session, and must be a text") from None
    if name and not NAME.fullmatch(name):
        raise invalid_field(
            SESSION_HEADER, "user or metadata.user_id names a session by 1 to 256 visible characters of ASCII"
        )
    return name
