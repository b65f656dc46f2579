"""The command `eval`: accuracy of a base model and of adapters on a dataset, side by side."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clotho.commands.command_line import require_new_file
from clotho.config.evaluation import EvaluationArguments, EvaluationProfile
from clotho.config.schema import AdaptersSection
from clotho.inference import DecodeEngine
from clotho.inference.greedy import complete_all, greedy
from clotho.memory.estimate import serving_memory
from clotho.memory.report import limit_memory
from clotho.models.adapter_store import AdapterStore
from clotho.models.base_model import BaseModel
from clotho.models.loading import find_model
from clotho.monitoring.event_log import event_log
from clotho.monitoring.terminal_text import terminal_text
from clotho.rewards.accuracy import Accuracy, Estimate, IsCorrect, accuracy, grade, mean_difference, pass_at
from clotho.rewards.runner import RewardRunner
from clotho.run.prompts import Rendered, read_split, render
from clotho.runtime.compute_thread import ComputeExecutor, finish
from clotho.storage.atomic_files import replace_file
from protocols.errors import AdapterRequestError, ModelError, ProfileError, RequestError
from protocols.sampling import BASE, Completion, SampleRequest, derive

log = structlog.get_logger(actor="eval")

BASE_NAME = "base"
"""Name of the base model in the results."""


class Graded(Struct, frozen=True, kw_only=True):
    """A completion. correct: None if no reward with `correct = true` applies. truncated: it reached the token limit."""

    text: str
    correct: bool | None
    tokens: int
    truncated: bool


class Record(Struct, frozen=True, kw_only=True):
    """One problem with the completions of one policy."""

    type: str
    prompt: str
    answer: str
    greedy: Graded
    samples: tuple[Graded, ...]


class PolicyResult(Struct, frozen=True, kw_only=True):
    """The results of the base model or of an adapter.

    greedy: accuracy of greedy completions. avg: mean accuracy of sampled completions. pass_at: by k, the probability
    that at least one of k sampled completions is correct. difference: of the greedy accuracy to the base model.
    truncated: share of greedy completions that reached the token limit.
    """

    greedy: Accuracy
    avg: Accuracy | None
    pass_at: dict[str, Accuracy]
    difference: Estimate | None
    truncated: float
    records: tuple[Record, ...] = ()


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


async def evaluate(arguments: EvaluationArguments, console: Console) -> int:
    """Evaluate, print the table or the JSON text, and write the output file; the exit status is 0.

    Raises ClothoError if an input cannot be used; nothing is written then.
    """
    flags, profile = arguments.flags, arguments.profile
    output = new_file(flags.output) if flags.output else None
    with ExitStack() as stack:
        stack.enter_context(event_log(console))
        rewards = RewardRunner(profile.rewards, overlong=None, keep_zero_variance=True)
        stack.callback(rewards.close)
        executor = ComputeExecutor(decode_share=profile.engine.decode_share)
        executor.start()
        stack.callback(executor.stop)
        await rewards.start()
        base, engine = await finish(executor.submit(lambda: load(arguments)))
        rendered = problems_of(arguments, base)
        require_graded(rendered, rewards)
        results: dict[str, PolicyResult] = {}
        for name in (*([BASE_NAME] if flags.base else []), *arguments.adapters):
            log.info("evaluating", policy=name, problems=len(rendered.problems))
            requests = requests_of(profile, rendered, BASE if name == BASE_NAME else name, flags.samples)
            steps = _decode(engine, requests, profile.engine.max_num_seqs)
            completions = await finish(executor.submit_steps(steps, kind="evaluation"))
            records = await graded(rendered, completions, rewards.is_correct)
            results[name] = result_of(rendered, records, results.get(BASE_NAME))
    found = Evaluation(
        model=profile.model.path,
        dataset=profile.data.train,
        part=flags.part,
        problems=len(rendered.problems),
        samples=flags.samples,
        temperature=profile.sampling.temperature,
        seed=profile.seed,
        policies=results,
    )
    if output is not None:
        replace_file(output, [msgspec.json.format(msgspec.json.encode(found), indent=1), b"\n"])
    show(console, found, as_json=flags.json)
    return 0


def new_file(name: str) -> Path:
    """Return the path of a file that does not exist, in a directory that exists. Raises ProfileError."""
    path = Path(name).expanduser()
    require_new_file(path)
    return path


def load(arguments: EvaluationArguments) -> tuple[BaseModel, DecodeEngine]:
    """Load the base model and all adapters, in the compute thread. Raises ModelError."""
    profile = arguments.profile
    find_model(profile.model.path)
    limit_memory(serving_memory(profile.model, profile.engine, profile.sampling), profile.monitor)
    base = BaseModel(profile.model)
    store = AdapterStore(base.model, AdaptersSection(max_loaded=max(1, len(arguments.adapters))))
    engine = DecodeEngine(base, profile.engine, store)
    for name, path in arguments.adapters.items():
        try:
            engine.load_adapter(name, store.read(path), keep=True)
        except AdapterRequestError as error:
            raise ModelError(f"--adapter {path}: {error}") from error
    return base, engine


def problems_of(arguments: EvaluationArguments, base: BaseModel) -> Rendered:
    """The problems to evaluate with their prompts. Raises DatasetError, ModelError, and ProfileError if one is long."""
    flags, profile = arguments.flags, arguments.profile
    split = read_split(profile)
    chosen = {"heldout": split.heldout, "train": split.train, "all": (*split.train, *split.heldout)}[flags.part]
    if not chosen:
        raise ProfileError("no problems are held out: set data.heldout_fraction, or evaluate --part all")
    rendered = render(chosen[: flags.limit or None], profile.data, base.tokenizer)
    longest = max(map(len, rendered.prompts)) + profile.sampling.max_tokens
    limit = min(base.context_length, profile.engine.kv_cache_tokens)
    if longest > limit:
        raise ProfileError(
            f"the longest prompt and sampling.max_tokens together have {longest} tokens, more than the {limit} of the "
            "context and of engine.kv_cache_tokens: set data.max_prompt_tokens or lower sampling.max_tokens"
        )
    return rendered


def require_graded(rendered: Rendered, rewards: RewardRunner) -> None:
    """Raise ProfileError if no reward with `correct = true` applies to any problem."""
    types = {problem.type for problem in rendered.problems}
    if set(rewards.types_without_correct(types)) == types:
        raise ProfileError("rewards: no reward with correct = true applies to the problems")


def requests_of(profile: EvaluationProfile, rendered: Rendered, weights: str, samples: int) -> list[SampleRequest]:
    """One greedy request per problem, then one request per problem for the sampled completions, if any."""
    requests = [
        SampleRequest(prompt=prompt, sampling=greedy(profile.sampling), seeds=(0,), weights=weights)
        for prompt in rendered.prompts
    ]
    if samples:
        sampling = replace(profile.sampling, top_logprobs=0)
        for index, prompt in enumerate(rendered.prompts):
            seeds = tuple(derive(profile.seed, "eval", index, sample) for sample in range(samples))
            requests.append(SampleRequest(prompt=prompt, sampling=sampling, seeds=seeds, weights=weights))
    return requests


def _decode(
    engine: DecodeEngine, requests: Sequence[SampleRequest], rows: int
) -> Generator[None, None, list[list[Completion]]]:
    try:
        return (yield from complete_all(engine, requests, engine.tick, rows=rows))
    except RequestError as error:
        raise ProfileError(f"sampling.{error.param}: {error}") from error


async def graded(rendered: Rendered, completions: list[list[Completion]], is_correct: IsCorrect) -> list[Record]:
    """Grade the completions of one policy: first the greedy ones, then the sampled ones, in the order of problems."""
    count = len(rendered.problems)
    sampled = completions[count:] or [[] for _ in range(count)]
    records = []
    for problem, (first,), others in zip(rendered.problems, completions[:count], sampled, strict=True):
        found = [first, *others]
        correct = await grade([problem] * len(found), [completion.text for completion in found], is_correct)
        grades = [
            Graded(text=c.text, correct=right, tokens=len(c.tokens), truncated=c.finish_reason == "length")
            for c, right in zip(found, correct, strict=True)
        ]
        records.append(
            Record(
                type=problem.type,
                prompt=problem.prompt,
                answer=problem.answer,
                greedy=grades[0],
                samples=tuple(grades[1:]),
            )
        )
    return records


def result_of(rendered: Rendered, records: Sequence[Record], base: PolicyResult | None) -> PolicyResult:
    """Summarize the records of one policy. base: the result of the base model, if it was evaluated."""
    first = [record.greedy.correct for record in records]
    counts = [_correct_samples(record) for record in records]
    samples = len(records[0].samples)
    shares = {
        k: [None if count is None else pass_at(k, correct=count, samples=samples) for count in counts]
        for k in powers_of_two(samples)
    }
    before = None if base is None else [record.greedy.correct for record in base.records]
    return PolicyResult(
        greedy=accuracy(rendered.problems, first),
        avg=accuracy(rendered.problems, [None if c is None else c / samples for c in counts]) if samples else None,
        pass_at={str(k): accuracy(rendered.problems, found) for k, found in shares.items()},
        difference=None if before is None else mean_difference(before, first),
        truncated=sum(record.greedy.truncated for record in records) / len(records),
        records=tuple(records),
    )


def _correct_samples(record: Record) -> int | None:
    correct = [sample.correct for sample in record.samples]
    return None if None in correct else sum(map(bool, correct))


def powers_of_two(limit: int) -> list[int]:
    """2, 4, 8, ... below `limit`, and `limit` itself, if it is at least 2. For one completion pass@1 is avg@k."""
    return [*(2**i for i in range(1, limit.bit_length()) if 2**i < limit), *([limit] if limit > 1 else [])]


def show(console: Console, found: Evaluation, *, as_json: bool) -> None:
    """Print the results as tables, or as JSON without the completions."""
    if as_json:
        short = {name: replace(result, records=()) for name, result in found.policies.items()}
        text = msgspec.json.format(msgspec.json.encode(replace(found, policies=short)), indent=1).decode()
        console.print(Text(text), soft_wrap=True)
        return
    console.print(_accuracy_table(found))
    if found.samples:
        console.print(_samples_table(found))


def _accuracy_table(found: Evaluation) -> Table:
    title = f"greedy accuracy on {found.problems} problems ({found.part}), intervals of 95 %"
    table = Table(title=Text(title), title_justify="left", safe_box=True)
    table.add_column(Text("problems"), overflow="fold")
    for name in found.policies:
        table.add_column(Text(terminal_text(name, 40)), justify="right", no_wrap=True)
    results = list(found.policies.values())
    table.add_row(Text("all"), *(Text(_in_words(result.greedy.overall)) for result in results))
    for kind in results[0].greedy.by_type:
        cells = (Text(_in_words(result.greedy.by_type[kind])) for result in results)
        table.add_row(Text(terminal_text(kind, 40)), *cells)
    if any(result.difference for result in results):
        cells = (Text(_in_words(result.difference, signed=True) if result.difference else "-") for result in results)
        table.add_row(Text("change"), *cells)
    table.add_row(Text("truncated"), *(Text(f"{result.truncated:.1%}") for result in results))
    if any(result.greedy.ungraded for result in results):
        table.add_row(Text("ungraded"), *(Text(str(result.greedy.ungraded)) for result in results))
    return table


def _samples_table(found: Evaluation) -> Table:
    title = f"{found.samples} completions per problem at temperature {found.temperature:g}"
    table = Table(title=Text(title), title_justify="left", safe_box=True)
    table.add_column(Text("policy"), overflow="fold")
    table.add_column(Text(f"avg@{found.samples}"), justify="right", no_wrap=True)
    for k in powers_of_two(found.samples):
        table.add_column(Text(f"pass@{k}"), justify="right", no_wrap=True)
    for name, result in found.policies.items():
        shares = [*([result.avg] if result.avg else []), *result.pass_at.values()]
        table.add_row(Text(terminal_text(name, 40)), *(Text(_in_words(share.overall)) for share in shares))
    return table


def _in_words(estimate: Estimate, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    value, low, high = (f"{number * 100:{sign}.1f}" for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"
