"""The command `doctor`: all checks of a start in full, and a rehearsal of the first steps with a forecast."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attachments.doctor.completions import (
    Completed,
    completion_findings,
    draw,
    examples,
    learnability,
    next_draw,
    rehearsal_batches,
    reward_rows,
    stop_reasons,
    trainable,
)
from attachments.doctor.problems import problem_findings, unparsable_finding
from attachments.doctor.progress import Progress
from attachments.doctor.rehearsal import (
    Forecast,
    Rehearsed,
    check_decoding,
    decode_rate,
    forecast,
    parity_findings,
    rehearsed_steps,
    update_findings,
    update_time,
)
from attachments.doctor.template import check_template, template_use
from attachments.doctor.versions import installed_versions, setting_findings, version_findings
from clotho.backend import backend
from clotho.extension import Door
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.experts import configuration_of, experts_per_token
from clotho.models.machine import compute_slots, memory_limit, physical_memory
from clotho.process import load_blas
from clotho.serving.server import listen
from clotho.settings.bounds import PositiveFloat, about
from clotho.settings.keys import Keys
from clotho.settings.model import FullMethod
from clotho.settings.server import HttpServer
from clotho.storage.atomic_files import replace_file
from protocols.errors import ClothoError, DatasetError, ProfileError, RecordsError, ServerError, visible
from protocols.finding import CHECK, LESS_MEMORY, Change, Finding, FindingName, Remedy
from protocols.rollout import GroupOutcome, RolloutGroup, ScoredGroup
from protocols.summary import MemoryEstimate
from training_run.adapters.contents import adapter_targets, reached_share
from training_run.commands.command_line import new_file
from training_run.directory.jsonl import encode
from training_run.directory.run_directory import open_run
from training_run.groups.prompts import read_split
from training_run.machine import describe_machine
from training_run.main import adjusted
from training_run.memory.estimate import estimate_memory
from training_run.memory.report import describe_limit, too_large
from training_run.profile.flags import COMMON, Arguments, as_flags, help_topic, key_help, parse_flags
from training_run.profile.keys import PROFILE_KEYS
from training_run.profile.load import load_profile
from training_run.profile.mounted import left_out
from training_run.profile.program import program
from training_run.profile.rules import CHECK as CHECK_PROFILE
from training_run.profile.rules import has_own_groups, slot_settings
from training_run.profile.schema import Profile
from training_run.records.event_log import event_log
from training_run.records.remedies import Loaded, accepted_change, command_line
from training_run.records.terminal_text import (
    duration,
    finding_lines,
    memory,
    number,
    percent,
    print_line,
    terminal_text,
)
from training_run.rewards.runner import expectations
from training_run.run import RunContext
from training_run.start.preflight import FINDINGS
from training_run.start.startup import build_context
from training_run.supervision.idle_sleep import no_idle_sleep

USAGE = f"usage: {program()} doctor [--profile P] [--json] [--output FILE] [--KEY VALUE ...]"
LINE_LIMIT = 4000
TEXT_LIMIT = 160
"""Characters of a prompt and of a completion in the table."""

SECONDS = 600.0
"""Time for completions and rehearsals, after the model is loaded."""


class DoctorFlags(Struct, frozen=True, kw_only=True):
    """The flags of `doctor` that are not keys of a profile."""

    profile: Annotated[str, about("Settings to check: a name or a .toml file.")] = "local-m3"
    json: Annotated[bool, about("Print JSON instead of a table.")] = False
    output: Annotated[str, about("JSON file for the results; it must not exist.")] = ""
    seconds: Annotated[PositiveFloat, about("Time for completions and rehearsals; says what it cuts off.")] = SECONDS


OWN = {name: key for name, key in Keys(DoctorFlags).settable.items() if key.help}


class Diagnosis:
    """Collects what was checked, with the results, and the findings.

    checks: result by subject, in order. completions: the drawn completions. forecast: None without a rehearsal.
    """

    def __init__(self) -> None:
        self.checks: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.completions: list[Completed] = []
        self.forecast: Forecast | None = None

    def add(self, subject: str, result: str, findings: Iterator[Finding] | Sequence[Finding] = ()) -> None:
        """Record a check."""
        self.checks[subject] = result
        self.findings += findings

    @contextmanager
    def refused(self, subject: str, name: FindingName, advice: str) -> Iterator[None]:
        """Turn an error inside the context into a finding. Other checks then cannot be made; `Stopped` is raised."""
        try:
            yield
        except ClothoError as error:
            self.add(subject, "refused", [_refusal(error, name, advice)])
            raise Stopped from error

    def as_json(self) -> bytes:
        """Return the results as JSON."""
        document = {
            "checks": self.checks,
            "completions": self.completions,
            "findings": sorted(self.findings, key=_order),
            "forecast": self.forecast,
        }
        return msgspec.json.format(encode(document, terminal_safe=True), indent=1) + b"\n"


class Stopped(Exception):
    """A check failed, without which the following checks cannot be made."""


def _refusal(error: ClothoError, name: FindingName, advice: str, remedy: Remedy = CHECK) -> Finding:
    if isinstance(error, RecordsError):
        return unparsable_finding(error)
    return Finding(
        name=name,
        severity="error",
        fact=visible(str(error), 1000),
        consequence="the run is refused with this message",
        advice=advice,
        remedy=remedy,
    )


def _order(finding: Finding) -> bool:
    return finding.severity != "error"


def run(argv: Sequence[str], console: Console) -> int:
    """Check a profile. Returns 0 without a finding and 1 with findings; raises ProfileError for bad input (2)."""
    if help_topic(argv) is not None:
        common = [key for path in COMMON if (key := PROFILE_KEYS.named(path))]
        lines = [USAGE, *map(key_help, [*OWN.values(), *common])]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        return 0
    values = parse_flags(argv, OWN, "doctor")
    flags = DoctorFlags(**{name: values.pop(name) for name in OWN if name in values})
    output = new_file(flags.output) if flags.output else None
    arguments = Arguments(profile=flags.profile, overrides=values)
    load = partial(load_profile, arguments.profile, adjust=partial(adjusted, arguments))
    diagnosis = anyio.run(partial(diagnose, load(arguments.overrides), Console(stderr=True), seconds=flags.seconds))
    diagnosis.findings = [
        completed(finding, arguments.profile, arguments.overrides, load) for finding in diagnosis.findings
    ]
    if output is not None:
        replace_file(output, [diagnosis.as_json()])
    if flags.json:
        console.print(Text(diagnosis.as_json().decode()), soft_wrap=True, end="")
    else:
        show(console, diagnosis)
    return int(bool(diagnosis.findings))


async def diagnose(profile: Profile, console: Console, *, seconds: float = SECONDS) -> Diagnosis:
    """Make all checks of a profile. console: for events and progress.

    seconds: time for completions and rehearsals. Nothing is written but a temporary run directory, which is deleted.
    """
    found, work = Diagnosis(), Progress(console, seconds)
    with ExitStack() as stack:
        stack.enter_context(event_log(console))
        stack.enter_context(no_idle_sleep(enabled=profile.monitor.prevent_sleep))
        stack.callback(work.stop)
        try:
            work.phase("checking machine, settings and problems")
            estimate = check_without_model(found, profile)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clotho-doctor-")))
            compute = Compute(decode_share=profile.engine.decode_share, slots=compute_slots())
            compute.start()
            stack.callback(compute.stop)
            work.phase("loading the model, with a first update")
            with found.refused("model", "run_refused", "correct what the message names"):
                context = await _context(profile, directory, compute, stack)
            found.add("model", _model(context, estimate))
            engine = context.sampler.engine
            found.add("compute", backend().compute_path(load_blas(), decodes=engine.has_row_decoder))
            if context.policy.adapted:
                found.add("adapter", _adapter(context))
            work.start()
            await _rehearse(found, context, work)
        except Stopped:
            pass
    return found


FACTS: Door[[Profile], Mapping[str, str]] = Door("attachment.facts")
"""Returns what is said about a machine or a profile, by subject."""


def check_without_model(found: Diagnosis, profile: Profile) -> MemoryEstimate:
    """Check machine, libraries, settings, port, memory and dataset. Raises Stopped."""
    described = describe_machine(blas=load_blas())
    where = f"MLX {described.mlx_version} on {described.backend}"
    found.add("machine", f"{described.processor}, {described.cores} cores, {memory(physical_memory())}; {where}")
    for subject, fact in (item for facts in FACTS(profile) for item in facts.items()):
        found.add(subject, fact)
    installed = installed_versions()
    found.add("versions", ", ".join(f"{n} {v}" for n, v in installed.items()), version_findings(installed))
    method = profile.policy.method
    adapter = "no adapter" if isinstance(method, FullMethod) else f"adapter scale {method.effective_scale:g}"
    found.add("settings", adapter, setting_findings(profile))
    if isinstance(profile.server, HttpServer):
        try:
            listen(profile.server).close()
            found.add("port", f"{profile.server.host} port {profile.server.port} is free")
        except ServerError as error:
            advice = "stop the other program, or choose another port with --server.port (0: any free port)"
            remedy = Remedy(action="start", changes=(Change(key="server.port", value="0"),))
            found.add("port", "cannot be used", [_refusal(error, "port_in_use", advice, remedy)])
    _check_dataset(found, profile)
    with found.refused("model", "model_unusable", "name a directory or a repository in model.path"):
        estimate = estimate_memory(profile.model, profile)
    found.findings += chain(*FINDINGS(profile, estimate))
    limit = memory_limit()
    text = f"{memory(estimate.total)} of {memory(limit.bytes)} ({describe_limit(limit)})"
    if refusal := too_large(estimate, limit):
        advice = "change the settings that the message names: --dry-run shows the memory of each part"
        found.add("memory", text, [_refusal(refusal, "too_little_memory", advice, LESS_MEMORY)])
        raise Stopped
    found.add("memory", text)
    return estimate


def _check_dataset(found: Diagnosis, profile: Profile) -> None:
    """Read and check the problems. Raises Stopped."""
    try:
        split = read_split(profile)
    except DatasetError as error:
        found.add("dataset", "refused", [_refusal(error, "dataset_unusable", "correct data.train")])
        raise Stopped from error
    except ProfileError as error:
        advice = "correct the key types of the reward in [[rewards]], or data.type_key"
        found.add("dataset", "refused", [_refusal(error, "no_reward_applies", advice)])
        raise Stopped from error
    found.add("dataset", f"{len(split.train)} problems for training, {len(split.heldout)} held out")
    if has_own_groups(profile):
        found.findings += problem_findings(split.train, profile.rewards, batch_size=profile.learner.batch_size)


async def _context(profile: Profile, directory: Path, compute: Compute, ending: ExitStack) -> RunContext:
    """Build the run without its server and trackers, in a temporary directory."""
    own = replace(left_out(profile, "doctor"), run_dir=str(directory))
    CHECK_PROFILE(own)
    run_directory = open_run(directory, resume=False, clean=False)
    try:
        return await build_context(own, run_directory, compute, ending, slow_seconds=profile.monitor.watchdog_seconds)
    finally:
        run_directory.close()


def _model(context: RunContext, estimate: MemoryEstimate) -> str:
    policy = context.policy.description
    quantized = f", {policy.quantization_bits} bits" if policy.quantization_bits else ""
    return f"{policy.architecture}, {policy.layers} layers{quantized}, {policy.dtype}; fits"


def _adapter(context: RunContext) -> str:
    policy = context.policy
    targets = adapter_targets(policy.model, policy.adapted)
    chosen = experts_per_token(configuration_of(policy.model))
    reached = reached_share(targets, [one.name for one in policy.adapted], chosen)
    experts = f", with {chosen} experts per token" if any(target.experts for target in targets.values()) else ""
    return f"reaches {percent(reached)} of the weights that compute a token in the blocks{experts}"


async def _rehearse(found: Diagnosis, context: RunContext, work: Progress) -> None:
    """Check the template, draw completions, check parity, rehearse updates, and forecast the end."""
    profile, compute = context.profile, context.compute
    template = check_template(context.policy.tokenizer, template_use(profile, context.prompts.problems))
    for name, fact in template.facts.items():
        found.add(f"template: {name}", fact)
    found.findings += template.findings
    groups, outcomes = await _draw(context, work)
    completions = [completion for group in groups for completion in group.completions]
    found.add("stop reasons", f"of {len(completions)} completions: {stop_reasons(completions) or 'none was finished'}")
    if outcomes:
        _describe_rewards(found, profile, outcomes)
    compared = next((group for group in groups if any(completion.tokens for completion in group.completions)), None)
    if compared is not None and work.reached("comparing the log-probabilities of sampler and learner"):
        forcing = context.policy_learner.forcing
        check = partial(check_decoding, compute, context.policy, context.sampler.engine, profile, compared, forcing)
        parity = await finish(compute.parity.submit(check))
        dtype = context.policy.description.dtype
        found.add("parity", f"mean KL {parity.mean_kl:.2g} nats", parity_findings(parity, profile, dtype))
    if trainable(outcomes):
        await _rehearse_updates(found, context, work, outcomes)
    elsewhere = {*slot_settings(profile, "sampler")}.difference(slot_settings(profile, "groups"))
    if groups and not elsewhere and work.reached("measuring decode rate and update time for the forecast"):
        await _forecast(found, context, groups)
    if work.cut_off:
        found.add("not reached", f"{'; '.join(work.cut_off)}: raise --seconds")


async def _draw(context: RunContext, work: Progress) -> tuple[list[RolloutGroup], list[GroupOutcome]]:
    """Draw completions until they have a signal and fill a batch; score them, unless environments do."""
    profile = context.profile
    groups: list[RolloutGroup] = []
    outcomes: list[GroupOutcome] = []
    while (wanted := next_draw(profile, outcomes)) is not None:
        count, size = wanted
        if not work.reached(f"drawing {count * size} completions of at most {profile.sampling.max_tokens} tokens"):
            break
        prompts = [context.prompts.prompt(len(groups) + number) for number in range(count)]
        drawn = await draw(
            context.rollouts(context.sampler.client, group_size=size),
            prompts,
            seconds=work.left,
            progress=lambda finished: work.note(f"{finished} are finished"),
        )
        groups += drawn
        if not has_own_groups(profile):
            break
        outcomes += [await context.rewards.score(group) for group in drawn]
        if len(drawn) < count:
            work.cut_off.append(f"{(count - len(drawn)) * size} of {count * size} completions")
            break
    return groups, outcomes


def _describe_rewards(found: Diagnosis, profile: Profile, outcomes: Sequence[GroupOutcome]) -> None:
    """Record what the rewards expect and gave, and the first completions."""
    expected = expectations(profile.rewards)
    found.add("system message", profile.data.system or "none")
    for name, text in expected.items():
        found.add(f"{name} expects", text)
    for name, values in reward_rows(outcomes):
        found.add(f"reward: {name}", values)
    sampled = [one for one in outcomes if not (isinstance(one, ScoredGroup) and one.token_advantages)]
    if estimate := learnability(sampled, batch_size=profile.learner.batch_size):
        found.add("learnability", estimate)
    found.findings += completion_findings(outcomes, expected)
    found.completions = list(examples(outcomes))


async def _rehearse_updates(
    found: Diagnosis, context: RunContext, work: Progress, outcomes: Sequence[GroupOutcome]
) -> None:
    """Rehearse the first updates of the run with the groups that were drawn."""
    profile, steps = context.profile, rehearsed_steps(context.profile)
    batches = [batch for batch in zip(steps, rehearsal_batches(profile, outcomes), strict=False) if batch[1]]
    if not work.reached(f"rehearsing {len(batches)} updates"):
        return

    def in_time() -> Iterator[tuple[int, list[ScoredGroup]]]:
        for position, batch in enumerate(batches, start=1):
            if not work.left:
                return
            work.note(f"update {position}")
            yield batch

    learner = context.policy_learner
    rehearsing = context.compute.learner.submit(lambda: learner.rehearse(in_time(), measure_update_kl=True))
    rehearsed = await finish(rehearsing)
    if len(rehearsed) < len(batches) and None not in rehearsed:
        work.cut_off.append(f"{len(batches) - len(rehearsed)} of {len(batches)} rehearsed updates")
    moved = [
        f"{number(one.update_kl, '.2g')} at the learning rate {one.learning_rate:g}" if one else "not finite"
        for one in rehearsed
    ]
    groups = " and ".join(str(len(groups)) for _, groups in batches)
    found.add(
        "rehearsed updates",
        f"{groups} groups with different rewards (learner.batch_size = {profile.learner.batch_size}); "
        f"KL in nats per token: {', '.join(moved) or 'none'}",
        update_findings(rehearsed, profile),
    )


async def _forecast(found: Diagnosis, context: RunContext, groups: Sequence[RolloutGroup]) -> None:
    profile, compute = context.profile, context.compute
    completions = [completion for group in groups for completion in group.completions]
    length = sum(completion.length for completion in completions) / len(completions)
    prompt = sum(len(group.prompt.tokens) for group in groups) / len(groups)
    rate = await decode_rate(context.sampler.client, context.prompts.prompt, profile, clock=time.perf_counter)
    compute.arbiter.take_longest_update_turn()
    positions = profile.learner.batch_size * (profile.sampling.group_size * length + prompt)
    length_limit = context.policy.context_length
    timed = partial(update_time, context.policy_learner, profile, context=length_limit, positions=positions)
    seconds = await finish(compute.learner.submit(timed))
    rehearsed = Rehearsed(
        completion_tokens=length,
        decode_tokens_per_second=rate,
        update_seconds=seconds,
        longest_turn_seconds=compute.arbiter.take_longest_update_turn(),
    )
    found.forecast = estimated = forecast(profile, rehearsed, heldout=len(context.held_out.problems))
    found.add("decoding", f"{rate:.0f} tokens/s, {length:.0f} tokens per completion")
    turn, limit = estimated.longest_turn_seconds * 1000, profile.learner.max_turn_ms
    found.add("update", f"{_time(seconds)}; longest turn {turn:.0f} ms (learner.max_turn_ms = {limit:g})")
    found.add(
        "forecast",
        f"{profile.steps} steps of {_time(estimated.seconds_per_step)} and {_time(estimated.evaluation_seconds)} of "
        f"evaluation: the run takes about {duration(estimated.seconds)}; from {duration(estimated.seconds_least)} to "
        f"{duration(estimated.seconds_most)}, by the number of zero-variance groups",
    )


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 60 else f"{seconds:.2g} s"


def episode_lines(completions: Sequence[Completed]) -> Iterator[str]:
    """Yield the turns of the first episode of several turns, and which of them are trained on."""
    episode = next((one for one in completions if one.turns), None)
    if episode is None:
        return
    yield f"an episode with reward {number(episode.reward)}, after the prompt {visible(episode.prompt, TEXT_LIMIT)}"
    end = 0
    for turn in episode.turns:
        start, end = end, end + turn.characters
        who = "policy" if turn.sampled else "environment, not trained on"
        yield f"  {who}, {turn.tokens} tokens: {visible(episode.completion[start:end], LINE_LIMIT)}"


def show(console: Console, found: Diagnosis) -> None:
    """Print what was checked, the completions, the findings and the forecast."""
    table = Table(title=Text("checked"), title_justify="left", safe_box=True, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    ascii_only = console.options.ascii_only
    for subject, result in found.checks.items():
        table.add_row(Text(subject), Text(terminal_text(result, LINE_LIMIT, ascii_only=ascii_only)))
    console.print(table)
    for completed in found.completions:
        prompt, text = (visible(one, TEXT_LIMIT, keep_end=60) for one in (completed.prompt, completed.completion))
        print_line(console, f"{number(completed.reward)} {completed.stop_reason}: {prompt} -> {text}")
    for line in episode_lines(found.completions):
        print_line(console, line)
    for finding in sorted(found.findings, key=_order):
        for line in finding_lines(finding, console.width):
            print_line(console, line, limit=LINE_LIMIT)
    count = len(found.findings)
    print_line(console, f"{count} finding{'s' if count != 1 else ''}" if count else "no finding")


def completed(finding: Finding, profile: str, overrides: Mapping[str, Any], load: Loaded) -> Finding:
    """Return a finding with the command line that checks the profile with a changed setting.

    profile: its name or path. overrides: settings of the command line. load: loads the profile with settings.
    """
    changes = accepted_change(finding.remedy.changes, lambda values: load({**overrides, **values}))
    argv = ["doctor", "--profile", profile, *as_flags({**overrides, **changes})]
    action = finding.remedy.action if changes else "check"
    return replace(finding, remedy=replace(finding.remedy, action=action), command=command_line(argv))
