"""The command `eval`: a base model and adapters on the same problems, side by side."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import msgspec
import structlog
from anyio.to_thread import run_sync
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clotho.extension import Door
from clotho.inference.engine import DecodeEngine
from clotho.inference.parts import RowWeights
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.loading import find_model
from clotho.models.machine import compute_slots
from clotho.models.policy import BaseModel
from clotho.models.tokenizer import ChatTokenizer
from clotho.sampler import OwnThreads, Sampler
from clotho.serving.struct_types import prepare_struct_types
from clotho.settings.server import AdaptersSection
from clotho.storage.atomic_files import replace_file
from protocols.errors import AdapterRequestError, ModelError, ProfileError, RequestError
from protocols.evaluation import Estimate, ReferenceLoss
from protocols.sampling import POLICY, Completion, SampleRequest
from training_run.commands.command_line import new_file
from training_run.evaluation.accuracy import (
    Accuracy,
    Comparison,
    Judged,
    Outcome,
    accuracy,
    avg_at_k,
    compare,
    graded,
    pass_at_k,
    powers_of_two,
    report_of,
)
from training_run.evaluation.held_out import complete_all, held_out_completions, reference_losses
from training_run.groups.prompts import read_split
from training_run.groups.rendering import Rendered, Renderer
from training_run.groups.rollout_source import Episodes
from training_run.memory.estimate import serving_memory
from training_run.memory.report import limit_memory
from training_run.profile.command_profiles import EvaluationArguments, EvaluationProfile
from training_run.records.event_log import event_log
from training_run.records.terminal_text import number, percent, terminal_text
from training_run.rewards.runner import RewardRunner
from training_run.supervision.idle_sleep import no_idle_sleep

log = structlog.get_logger(actor="eval")

BASE_NAME = "base"
"""Name of the base model in the results."""

Row = tuple[str, list[str]]
"""A row of a table: its label, and the cell of each policy."""


class Graded(Struct, frozen=True, kw_only=True):
    """A completion. correct: None if no reward with `correct = true` applies. truncated: it reached the token limit.

    reward: weighted sum of the functions that apply; None if none does, or one failed. rewards: their values.
    """

    text: str
    correct: bool | None
    reward: float | None
    rewards: Mapping[str, float]
    tokens: int
    truncated: bool


class EvaluatedProblem(Struct, frozen=True, kw_only=True):
    """One problem with the completions of one policy. loss: of the reference completion; None if there is none."""

    type: str
    prompt: str
    answer: str
    greedy: Graded
    samples: tuple[Graded, ...]
    loss: ReferenceLoss | None


class PolicyResult(Struct, frozen=True, kw_only=True):
    """The results of the base model or of an adapter; None, or a missing key, if no problem has a value.

    greedy: accuracy of greedy completions. avg: mean accuracy of sampled completions. pass_at: by k, the probability
    that at least one of k sampled completions is correct. failed: number of problems with a reward function that
    failed. comparison: with the base model. Other fields: as in `EvalReport`.
    """

    greedy: Accuracy
    avg: Accuracy | None
    pass_at: dict[str, Accuracy]
    failed: int
    reward: Estimate | None
    rewards: Mapping[str, Estimate]
    sampled_reward: Estimate | None
    loss: Estimate | None
    completion_length: float | None
    truncated: float | None
    comparison: Comparison | None
    records: tuple[EvaluatedProblem, ...] = ()


class Evaluation(Struct, frozen=True, kw_only=True):
    """The results of all policies, by name. samples: sampled completions per problem."""

    model: str
    dataset: str
    part: str
    problems: int
    samples: int
    temperature: float
    seed: int
    policies: dict[str, PolicyResult]


MakeEpisodes = Callable[[ChatTokenizer, int], Episodes]
"""Makes the source of episodes with the tokenizer and the context length of a policy."""

EVALUATED: Door[[EvaluationProfile, ExitStack], Awaitable[MakeEpisodes | None]] = Door("attachment.evaluated")
"""Begins what must exist before `eval` loads its model. None: `eval` samples completions.

The second argument is closed when the command ends.
"""


async def evaluate(arguments: EvaluationArguments, console: Console) -> int:
    """Evaluate, print the table or the JSON text, and write the output file; the exit status is 0.

    Raises ClothoError if an input cannot be used; nothing is written then.
    """
    flags, profile = arguments.flags, arguments.profile
    output = new_file(flags.output) if flags.output else None
    outcomes = await outcomes_of(arguments, console)
    results = {name: result_of(name, found, outcomes.get(BASE_NAME)) for name, found in outcomes.items()}
    found = Evaluation(
        model=profile.model.path,
        dataset=profile.data.train,
        part=flags.part,
        problems=len(next(iter(outcomes.values()))),
        samples=flags.samples,
        temperature=profile.sampling.temperature,
        seed=profile.seed,
        policies=results,
    )
    if output is not None:
        replace_file(output, [msgspec.json.format(msgspec.json.encode(found), indent=1), b"\n"])
    show(console, found, as_json=flags.json)
    return 0


async def outcomes_of(
    arguments: EvaluationArguments, console: Console, *, must_judge: bool = True
) -> dict[str, list[Outcome]]:
    """Sample and grade the completions of each policy; return the outcomes of the problems by its name.

    must_judge: completions must be correct or wrong. Raises ClothoError if an input cannot be used.
    """
    flags, profile = arguments.flags, arguments.profile
    with ExitStack() as stack:
        stack.enter_context(event_log(console))
        stack.enter_context(no_idle_sleep(enabled=True))
        rewards = RewardRunner(profile.rewards, overlong=None, keep_zero_variance=True)
        stack.callback(rewards.close)
        prepare_struct_types()
        compute = Compute(decode_share=profile.engine.decode_share, slots=compute_slots())
        compute.start()
        stack.callback(compute.stop)
        await rewards.start(compute)
        made = [await evaluated(profile, stack) for evaluated in EVALUATED.functions]
        make_episodes = next(filter(None, made), None)
        base = await finish(compute.decode.submit(lambda: load(arguments)))
        sampler = await run_sync(make_sampler, arguments, base, compute)
        rendered, references = problems_of(arguments, base)
        require_graded(rendered, rewards, in_episodes=make_episodes is not None, must_judge=must_judge)
        rewards.require_columns(rendered.problems)
        episodes = None if make_episodes is None else make_episodes(base.tokenizer, base.context_length)
        outcomes: dict[str, list[Outcome]] = {}
        for name in (*([BASE_NAME] if flags.base else []), *arguments.adapters):
            log.info("evaluating", policy=name, problems=len(rendered.problems))
            completions, losses = await completions_of(arguments, name, rendered, references, sampler, episodes)
            outcomes[name] = await graded(rendered.problems, completions, rewards.grade, losses=losses)
    return outcomes


def load(arguments: EvaluationArguments) -> BaseModel:
    """Load the base model, in a compute thread. Raises ModelError."""
    profile = arguments.profile
    find_model(profile.model.path)
    limit_memory(serving_memory(profile.model, profile.engine, profile.sampling), profile.memory)
    return BaseModel(profile.model)


def make_sampler(arguments: EvaluationArguments, base: BaseModel, compute: Compute) -> Sampler:
    """Return a sampler of the base model and all adapters. Raises ModelError."""
    profile = arguments.profile
    limits = AdaptersSection(max_loaded=max(1, len(arguments.adapters)))
    sampler = Sampler(base, threads=OwnThreads(compute=compute, settings=profile.engine, adapters=limits))
    compute.decode.submit(lambda: load_adapters(arguments, sampler.engine.row_weights)).result()
    return sampler


def load_adapters(arguments: EvaluationArguments, rows: RowWeights) -> None:
    """Load the adapters, in the thread of the engine. Raises ModelError."""
    for name, path in arguments.adapters.items():
        try:
            contents = rows.read(path, arguments.profile.model.path)
            rows.load(name, contents, protected=arguments.adapters)
        except AdapterRequestError as error:
            raise ModelError(f"--adapter {path}: {error}") from error


def problems_of(arguments: EvaluationArguments, base: BaseModel) -> tuple[Rendered, Sequence[tuple[int, ...]]]:
    """The problems to evaluate with their prompts, and their reference completions.

    Raises DatasetError, ModelError, and ProfileError if a prompt is long.
    """
    flags, profile = arguments.flags, arguments.profile
    split = read_split(profile)
    chosen = {"heldout": split.heldout, "train": split.train, "all": (*split.train, *split.heldout)}[flags.part]
    if not chosen:
        raise ProfileError("no problems are held out: set data.heldout_fraction, or evaluate --part all")
    renderer = Renderer(profile.data, base.tokenizer, log.info if flags.json else log.warning)
    rendered = renderer.render(chosen[: flags.limit or None])
    longest = max(rendered.lengths) + profile.sampling.max_tokens
    limit = min(base.context_length, profile.engine.kv_cache_tokens)
    if longest > limit:
        raise ProfileError(
            f"the longest prompt and sampling.max_tokens together have {longest} tokens, more than the {limit} of the "
            "context and of engine.kv_cache_tokens: set data.max_prompt_tokens or lower sampling.max_tokens"
        )
    return rendered, renderer.references(rendered)


def require_graded(rendered: Rendered, rewards: RewardRunner, *, in_episodes: bool, must_judge: bool) -> None:
    """Raise ProfileError if a reward lacks its environment, or none with `correct = true` applies to any problem.

    must_judge: whether one must apply.
    """
    if not in_episodes and (names := rewards.from_environments):
        raise ProfileError(f"the reward {names[0]!r} is that of an environment, and the profile has none: set agent")
    types = {problem.type for problem in rendered.problems}
    if must_judge and set(rewards.types_without_correct(types)) == types:
        raise ProfileError("rewards: no reward with correct = true applies to the problems")


async def completions_of(
    arguments: EvaluationArguments,
    name: str,
    rendered: Rendered,
    references: Sequence[tuple[int, ...]],
    sampler: Sampler,
    episodes: Episodes | None,
) -> tuple[list[list[Completion]], list[ReferenceLoss | None]]:
    """Return the completions of each problem by one policy, and the losses of the reference completions.

    episodes: come in the place of completions.
    """
    profile, prompts = arguments.profile, rendered.prompts
    weights = POLICY if name == BASE_NAME else name  # the engine of this command samples from the base model
    sampling, samples, seed = profile.sampling, arguments.flags.samples, profile.seed
    thread, engine, base = sampler.compute.decode, sampler.engine, sampler.policy
    rows, pause = profile.engine.max_num_seqs, thread.lane.pause

    async def complete(requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        named = [replace(request, weights=weights) for request in requests]
        return await finish(thread.submit(lambda: _decode(engine, named, rows, pause)))

    completions = await held_out_completions(
        rendered.problems, prompts, sampling, complete, episodes=episodes, samples=samples, seed=seed
    )
    if not any(references):
        return completions, []

    adapter = await finish(thread.submit(lambda: engine.row_weights.admit(weights)))

    def losses() -> list[ReferenceLoss | None]:
        """Return the loss of every reference completion under the weights."""
        parameters = base.served()[0]
        return reference_losses(
            lambda tokens: sampler.scorer.score(parameters, tokens, version=0, adapter=adapter),
            prompts,
            references,
            context_length=base.context_length,
        )

    return completions, await finish(sampler.compute.scoring.submit(losses))


def _decode(
    engine: DecodeEngine, requests: Sequence[SampleRequest], rows: int, pause: Callable[[], None]
) -> list[list[Completion]]:
    try:
        return complete_all(engine, requests, rows=rows, pause=pause)
    except RequestError as error:
        raise ProfileError(f"sampling.{error.param}: {error}") from error


def result_of(name: str, outcomes: Sequence[Outcome], base: Sequence[Outcome] | None) -> PolicyResult:
    """Summarize the outcomes of one policy. base: those of the base model, if it was evaluated."""
    found = report_of(outcomes)
    return PolicyResult(
        greedy=accuracy(outcomes),
        avg=avg_at_k(outcomes) if found.samples else None,
        pass_at={str(k): pass_at_k(outcomes, k) for k in powers_of_two(found.samples)},
        failed=found.failed,
        reward=found.reward,
        rewards=found.rewards,
        sampled_reward=found.sampled_reward,
        loss=found.loss,
        completion_length=found.completion_length,
        truncated=found.truncated,
        comparison=None if base is None or name == BASE_NAME else compare(base, outcomes),
        records=tuple(map(_record, outcomes)),
    )


def _record(outcome: Outcome) -> EvaluatedProblem:
    problem = outcome.problem
    return EvaluatedProblem(
        type=problem.type,
        prompt=problem.prompt,
        answer=problem.answer,
        greedy=_graded(outcome.greedy),
        samples=tuple(map(_graded, outcome.samples)),
        loss=outcome.loss,
    )


def _graded(judged: Judged) -> Graded:
    completion, grade = judged.completion, judged.grade
    return Graded(
        text=completion.text,
        correct=grade.correct,
        reward=grade.reward,
        rewards=grade.parts,
        tokens=completion.length,
        truncated=completion.finish_reason == "length",
    )


def show(console: Console, found: Evaluation, *, as_json: bool) -> None:
    """Print the results as tables, or as JSON without the completions."""
    if as_json:
        short = {name: replace(result, records=()) for name, result in found.policies.items()}
        text = msgspec.json.format(msgspec.json.encode(replace(found, policies=short)), indent=1).decode()
        console.print(Text(text), soft_wrap=True)
        return
    title = f"greedy completions of {found.problems} problems ({found.part}), intervals of 95 %"
    _print_table(console, title, found.policies, _greedy_rows(found))
    if found.samples:
        title = f"{found.samples} completions per problem at temperature {found.temperature:g}"
        _print_table(console, title, found.policies, _sample_rows(found))
    compared = {name: result.comparison for name, result in found.policies.items() if result.comparison}
    if compared:
        title = "difference to the base model, intervals of 95 %"
        _print_table(console, title, compared, _comparison_rows(list(compared.values()), found.samples))


def _greedy_rows(found: Evaluation) -> Iterator[Row]:
    results = list(found.policies.values())
    yield "accuracy (%)", [_share(result.greedy.overall) for result in results]
    for kind in sorted({kind for result in results for kind in result.greedy.by_type}):
        yield f"  {kind}", [_share(result.greedy.by_type.get(kind)) for result in results]
    yield "reward", [_value(result.reward) for result in results]
    for name in sorted({name for result in results for name in result.rewards}):
        yield f"  {name}", [_value(result.rewards.get(name)) for result in results]
    if any(result.loss for result in results):
        yield "held-out loss", [_value(result.loss) for result in results]
    yield "mean length", [number(result.completion_length, ".1f") for result in results]
    yield "truncated", [percent(result.truncated) for result in results]
    if any(result.greedy.ungraded for result in results):
        yield "ungraded problems", [str(result.greedy.ungraded) for result in results]
    if any(result.failed for result in results):
        yield "failed rewards", [str(result.failed) for result in results]


def _sample_rows(found: Evaluation) -> Iterator[Row]:
    results = list(found.policies.values())
    yield f"avg@{found.samples} (%)", [_share(result.avg.overall if result.avg else None) for result in results]
    for k in powers_of_two(found.samples):
        yield f"pass@{k} (%)", [_share(result.pass_at[str(k)].overall) for result in results]
    yield "reward", [_value(result.sampled_reward) for result in results]


def _comparison_rows(results: Sequence[Comparison], samples: int) -> Iterator[Row]:
    yield "accuracy (points)", [_share(result.accuracy, "+") for result in results]
    yield "  solved by one only", [f"{result.gained} gained, {result.lost} lost" for result in results]
    yield "  p (McNemar)", [f"{result.p_value:.3g}" for result in results]
    yield "reward", [_value(result.reward, "+") for result in results]
    if any(result.loss for result in results):
        yield "held-out loss", [_value(result.loss, "+") for result in results]
    if samples:
        yield f"avg@{samples} (points)", [_share(result.avg, "+") for result in results]
    for k in powers_of_two(samples):
        yield f"pass@{k} (points)", [_share(result.pass_at.get(str(k)), "+") for result in results]


def _print_table(console: Console, title: str, columns: Iterable[str], rows: Iterable[Row]) -> None:
    table = Table(title=Text(title), title_justify="left", safe_box=True)
    table.add_column(overflow="fold")
    for name in columns:
        table.add_column(Text(terminal_text(name, 40)), justify="right", no_wrap=True)
    for label, cells in rows:
        table.add_row(Text(terminal_text(label, 40)), *map(Text, cells))
    console.print(table)


def _share(estimate: Estimate | None, sign: str = "") -> str:
    """Format a share or a difference of shares in percent with its interval; `-` if there is none."""
    return _in_words(estimate, 100, f"{sign}.1f")


def _value(estimate: Estimate | None, sign: str = "") -> str:
    """Format a mean or a difference of means with its interval; `-` if there is none."""
    return _in_words(estimate, 1, f"{sign}.3f")


def _in_words(estimate: Estimate | None, factor: int, form: str) -> str:
    if estimate is None:
        return "-"
    value, low, high = (format(end * factor, form) for end in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"
