"""Rules between settings: rows of two tables, which apply only if the chosen types have their keys, and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import msgspec

from clotho.extension import Door, RowsDoor
from clotho.settings.objectives import Preference
from clotho.settings.server import is_loopback
from protocols.learnability import unlearnable
from protocols.sampling import PARAMETERS, POLICY, in_use
from training_run.profile.keys import KEYS, PROFILE_KEYS, SECTIONS, SETTABLE, by_path
from training_run.profile.schema import Profile

Values = dict[str, Any]  # a resolved profile by key path; arrays of tables are tuples of structs


class Complaint(NamedTuple):
    """An invalid key, and a sentence with the reason and the remedy.

    decided_by: keys that leave it without effect; if a higher layer set such a key, the invalid key gets its default.
    """

    key: str
    text: str
    decided_by: tuple[str, ...] = ()


class Rule(NamedTuple):
    """A condition (profile, value) under which keys are refused. In the reason, `{}` is the value, `v` the profile."""

    keys: str
    refused: Callable[[Values, Any], bool]
    reason: str
    decided_by: str = ""


RATIO = "learner.objective.ratio_reference"
ADVANTAGE, FROM_GROUPS = "learner.objective.advantage.type", "environment"
OVERLONG = "learner.objective.overlong_penalty.type"
MAX_RATIO = "learner.objective.dynamic_sampling_max_ratio"
CLIP_RANGE = " ".join(f"learner.objective.{key}" for key in ("clip_low", "clip_high", "dual_clip"))
PREFERENCES = tuple(one.__struct_config__.tag for one in get_args(Preference))
RATIO_MASKS = " ".join(f"learner.objective.{key}" for key in ("outlier_low", "outlier_high", "off_policy_mask"))
SIGMOID = "learner.objective.sapo_tau_pos learner.objective.sapo_tau_neg"


def one_step(v: Values) -> bool:
    """Whether there is one optimizer step per batch, so that its policy is the policy at the start of the batch."""
    return bool(v["learner.update_epochs"] * v["learner.num_minibatches"] == 1)


def custom_flow(v: Values) -> bool:
    """Whether groups pass through a custom actor, which may add data that built-in actors do not."""
    return any(actor.is_in_group_flow for actor in v["actors"])


def has_environments(v: Values) -> bool:
    """Whether groups come from environments, which an attachment may provide."""
    return bool(v.get("atropos.type", "off") != "off")


def from_clients(v: Values) -> bool:
    """Whether groups and their rewards come over HTTP: from environments, or from the sessions of clients."""
    return has_environments(v) or v.get("sessions.type", "off") != "off"


def needs_rewards(v: Values) -> bool:
    """Whether something is learned from rewards: not in a run of demonstrations, pairs or a teacher alone.

    Stages say it themselves.
    """
    of_dataset = v["learner.objective.type"] in PREFERENCES and v.get("preference.pairs") == "dataset"
    of_teacher = v.get("distillation.teacher", "") not in ("", POLICY) and not v["distillation.beside_rewards"]
    return not (v["learner.objective.type"] == "sft" or of_dataset or of_teacher or v.get("stages"))


def compares_in_groups(v: Values) -> bool:
    """Whether all that is learned is how completions differ from the others of their group."""
    judged = v.get("critic.type", "off") != "off" or v.get("distillation.teacher") or custom_flow(v)
    return not judged and v.get(ADVANTAGE) not in ("batch", FROM_GROUPS)


# fmt: off
NO_EFFECT = (
    Rule("learner.distillation_weight", lambda v, _: not (has_environments(v) or v.get("distillation.teacher")),
         "there is no teacher: set distillation.teacher, or take groups from environments (atropos)",
         "atropos.type distillation.teacher"),
    Rule(f"queues.prompts queues.rollouts {MAX_RATIO} {OVERLONG}", lambda v, _: from_clients(v),
         "groups and their rewards come over HTTP (atropos, sessions)", "atropos.type sessions.type"),
    Rule("learner.max_failed_batches", lambda v, _: from_clients(v) and not custom_flow(v),
         "rewards that come over HTTP (atropos, sessions) do not fail in the run", "atropos.type sessions.type actors"),
    Rule("policy.method.alpha policy.method.scaling", lambda v, _: v["policy.method.scale"] is not None,
         "policy.method.scale is the factor", "policy.method.scale"),
    Rule("learner.lora_plus", lambda v, _: v["policy.method.type"] == "full",
         'policy.method = "full" trains no adapter', "policy.method.type"),
    Rule("rollouts.max_batches_ahead learner.max_staleness", lambda v, _: not v["async"],
         "with async = false no batch is sampled ahead", "async"),
    Rule("rollouts.lag", lambda v, _: v["async"],
         "with async = true the age of a batch depends on the machine", "async"),
    Rule("data.heldout_fraction", lambda v, _: bool(v["data.heldout"] or v["data.heldout_split"]),
         "data.heldout or data.heldout_split names the held-out problems", "data.heldout data.heldout_split"),
    Rule("learner.kl_penalty.reference.interval", lambda v, x: x >= v["steps"],
         "it must be less than steps = {v[steps]}: the reference would never move", "steps"),
    Rule("tracking.run_name tracking.tags", lambda v, _: not v.get("trackers"),
         "no [[trackers]] are listed", "trackers"),
    Rule("tracking.project tracking.group", lambda v, _: not v.get("trackers") and not has_environments(v),
         "no [[trackers]] are listed", "trackers atropos.type"),
    Rule("checkpoint.keep_last", lambda v, _: v["checkpoint.interval"] == 0,
         "checkpoint.interval = 0 writes one checkpoint, at the end", "checkpoint.interval"),
    Rule("eval.problems_between", lambda v, _: v["eval.interval"] == 0,
         "eval.interval = 0 disables evaluation during training", "eval.interval"),
    Rule(f"{CLIP_RANGE} {SIGMOID}",
         lambda v, _: v.get(RATIO, "sampler") != "sampler" and one_step(v) and v["learner.objective.type"] != "custom",
         "with one optimizer step per batch (learner.update_epochs, learner.num_minibatches) the importance ratio is 1",
         f"{RATIO} learner.update_epochs learner.num_minibatches"),
    Rule(ADVANTAGE, lambda v, x: x != "best_worst" and v["learner.objective.type"] in PREFERENCES,
         'objectives of preferences learn pairs, which "best_worst" marks', "learner.objective.type"),
    Rule("learner.objective.loss_aggregation",
         lambda v, x: x != "sequence_mean" and v["learner.objective.type"] in PREFERENCES,
         'the loss of objectives of preferences is a mean over pairs, "sequence_mean"', "learner.objective.type"),
    Rule("learner.kl_penalty.type", lambda v, _: v["learner.objective.type"] in PREFERENCES,
         "objectives of preferences have a reference policy of their own", "learner.objective.type"),
    Rule(f"learner.objective.mask_truncated {RATIO_MASKS}", lambda v, _: v["learner.objective.type"] in PREFERENCES,
         "objectives of preferences compare completions, and leave none out", "learner.objective.type"),
    Rule("learner.step_scale.type", lambda v, _: v["learner.objective.type"] in ("sft", *PREFERENCES),
         "it follows the importance ratio, which learner.objective does not have", "learner.objective.type"),
)
"""Settings that are refused unless they have their default. Ordered: a row precedes rows that depend on its keys."""

CONTRADICTIONS = (
    Rule("policy.method.num_layers", lambda v, x: x == 0, "must be -1 (all blocks) or positive, not 0"),
    Rule("policy.method.dropout", lambda v, x: x > 0 and v["policy.grad_checkpoint"] is True,
         "= {} and policy.grad_checkpoint exclude each other: a recomputed block would sample another dropout mask"),
    Rule("learner.objective.importance_correction.type", lambda v, x: x != "off" and v[RATIO] == "sampler",
         f'= "{{}}" corrects the mismatch with the sampler a second time: set "off", or {RATIO} = "batch_start"'),
    Rule(RATIO, lambda v, x: x == "batch_start_interpolated" and one_step(v),
         '= "{}" has no effect with one optimizer step per batch: use "batch_start"'),
    Rule("learner.objective.outlier_high learner.objective.dual_clip", lambda v, x: 0 < x <= 1,
         "must be 0 (off) or greater than 1, not {}"),
    Rule(MAX_RATIO, lambda v, x: x > 0 and int(x * v["learner.batch_size"]) <= v["learner.batch_size"],
         "= {} must allow at least one group more than learner.batch_size = {v[learner.batch_size]}"),
    Rule(MAX_RATIO, lambda v, x: x > 0 and any((a.mode, a.at) == ("replace", "learner") for a in v["actors"]),
         "belongs to the built-in learner, which a custom actor replaces"),
    Rule(MAX_RATIO, lambda v, x: x > 0 and v["rollouts.lag"] > 0,
         "= {} and rollouts.lag exclude each other: replacements are sampled with the newest weights"),
    Rule(ADVANTAGE, lambda v, x: x == "environment" and not has_environments(v) and not custom_flow(v)
         and v["learner.objective.type"] != "sft",
         '= "{}" needs groups with advantages per token: from environments (atropos) or from a custom actor'),
    Rule("learner.objective.type", lambda v, x: x == "sft" and "sft.train_on" not in v and not custom_flow(v),
         "= \"{}\" learns demonstrations, which the attachment 'sft' reads; this installation lacks it"),
    Rule("learner.batch_size", lambda v, x: x == 1 and v["learner.objective.type"] == "kto",
         '= {} and learner.objective = "kto" exclude each other: the reference point needs other prompts'),
    Rule(f"{OVERLONG} learner.kl_penalty.type", lambda v, x: x in ("linear", "reward") and v[ADVANTAGE] == FROM_GROUPS,
         '= "{}" has no effect: learner.objective.advantage = "environment" ignores rewards'),
    Rule("learner.kl_penalty.reference.type", lambda v, x: x == "environment" and not has_environments(v),
         '= "{}" needs groups from environments (atropos)'),
    Rule("server.type", lambda v, x: x == "off" and from_clients(v),
         '= "{}" contradicts atropos and sessions, whose clients sample over HTTP'),
    Rule("async", lambda v, x: not x and from_clients(v),
         "= false excludes atropos and sessions: clients run ahead; learner.max_staleness limits how far"),
    Rule("learner.num_minibatches", lambda v, x: x > v["learner.batch_size"] + v.get("replay.groups", 0),
         "= {} must be at most the number of groups per update: learner.batch_size and replay.groups"),
    Rule("sampling.group_size", lambda v, x: x == 1 and compares_in_groups(v),
         "= {} leaves nothing to compare a completion with: take at least 2, a critic, a teacher, or "
         'learner.objective.advantage = "batch"'),
    Rule("sampling.max_tokens", lambda v, x: x >= v["engine.kv_cache_tokens"],
         "= {} must be less than engine.kv_cache_tokens = {v[engine.kv_cache_tokens]}"),
    Rule("learner.objective.overlong_penalty.buffer", lambda v, x: x >= v["sampling.max_tokens"],
         "= {} must be less than sampling.max_tokens = {v[sampling.max_tokens]}"),
    Rule("learner.schedule.min_learning_rate", lambda v, x: x > v["learner.optimizer.learning_rate"],
         "= {} exceeds learner.optimizer.learning_rate", "learner.optimizer.learning_rate learner.optimizer.type"),
    Rule("data.answer_key", lambda v, x: x == v["data.prompt_key"], 'and data.prompt_key are both "{}"'),
    Rule("data.heldout_fraction", lambda v, x: x == 0 and not v["data.heldout"] + v["data.heldout_split"]
         and v["eval.type"] != "off",
         '= 0 means no held-out problems: set data.heldout, or eval = "off"'),
    Rule("run_dir", lambda v, x: not x or "{" in x.replace("{profile}", ""),
         'must name a directory, and {{profile}} is the only placeholder, not "{}"'),
    Rule("rewards", lambda v, x: not x and needs_rewards(v),
         "are missing: list at least one in [[rewards]]; only demonstrations and pairs of a dataset need none"),
    Rule("rewards", lambda v, x: bool(x) and all(reward.weight == 0 for reward in x),
         "need a weight other than 0, because every advantage would be 0"),
    Rule("rewards", lambda v, x: bool(x) and v["eval.type"] != "off" and not any(reward.correct for reward in x),
         'need one with correct = true for evaluation; mark one, or set eval = "off"'),
    Rule("rewards",
         lambda v, x: v.get("cluster.type", "off") == "off" and any(reward.where == "cluster" for reward in x),
         'with where = "cluster" need a cluster: set cluster = "ray", or remove where'),
    Rule("server.host", lambda v, x: not (v["server.api_key"] or v.get("server.api_keys_file") or is_loopback(x)),
         '= "{}" is reachable from other machines: set server.api_keys_file or server.api_key, or bind 127.0.0.1'),
)
"""Settings that are refused in any case."""
# fmt: on


ATTACHED_NO_EFFECT: RowsDoor[Rule] = RowsDoor("attachment.NO_EFFECT")
ATTACHED_CONTRADICTIONS: RowsDoor[Rule] = RowsDoor("attachment.CONTRADICTIONS")
"""Rows of attachments for the two tables."""

COMPLAINTS: Door[[Profile], Iterable[Complaint]] = Door("attachment.complaints")
"""Returns what is wrong between settings, beyond the rows of the two tables."""

CHECK: Door[[Profile], None] = Door("attachment.check")
"""Raises ProfileError for what cannot work; in milliseconds, and before the run directory is touched."""

SLOTS_OF: Door[[Profile], Mapping[str, str]] = Door("attachment.slots")
"""Returns the slots that the attachment fills, or that have no use with it: name -> the setting that says so.

The setting begins with its key, such as `cluster = "ray"`.
"""

SLOTS = {
    "sampler": "where rollouts are sampled",
    "episodes": "whether the policy completes a prompt or acts in an environment",
    "groups": "where groups come from",
    "chooser": "of which problems groups are",
}
"""What at most one attachment of a run decides: name of the slot -> what it is, in a refusal."""


def first_complaint(profile: Profile) -> Complaint | None:
    """The complaint of the first violated rule; None if the profile is valid."""
    checks: list[Callable[[Profile], Iterable[Complaint]]] = [
        learnable_distribution,
        violated_rows,
        one_setting_per_slot,
        rewards_of_environments,
        *COMPLAINTS.functions,
    ]
    return next((complaint for check in checks for complaint in check(profile)), None)


def learnable_distribution(profile: Profile) -> Iterator[Complaint]:
    """The learner can evaluate the sampling distribution; parameters that only add to API responses are refused."""
    if (found := unlearnable(profile.sampling)) is not None:
        yield Complaint(f"sampling.{found.parameter}", f"sampling.{found.reason}")
    for name in in_use(profile.sampling, affects="report"):
        text = f"sampling.{name} must be {PARAMETERS[name].neutral} in training: only API requests report it"
        yield Complaint(f"sampling.{name}", text)


def violated_rows(profile: Profile) -> Iterator[Complaint]:
    """The complaints of both tables."""
    arrays = {
        path: getattr(profile, path) for path, section in SECTIONS.items() if section.repeated and "." not in path
    }
    v: Values = by_path(msgspec.to_builtins(profile), KEYS) | arrays
    chosen = PROFILE_KEYS.chosen_types(v)
    without_effect = rules_without_effect()
    for rule in (*without_effect, *contradictions()):
        for key in filter(SETTABLE.__contains__, rule.keys.split()):  # another attachment may be absent
            variant = SETTABLE[key].variant(chosen)
            if variant and rule.refused(v, v[key]) and not (rule in without_effect and v[key] == variant.default):
                reason = rule.reason.format(v[key], v=v)
                text = f"{key.removesuffix('.type')} {'has no effect: ' if rule in without_effect else ''}{reason}"
                yield Complaint(key, text, tuple(rule.decided_by.split()))


def one_setting_per_slot(profile: Profile) -> Iterator[Complaint]:
    """Two settings do not decide the same: where rollouts are sampled, where groups come from, or of which problems."""
    for slot, what in SLOTS.items():
        for setting, other in pairwise(slot_settings(profile, slot)):
            yield Complaint(other.partition(" ")[0], f"{other} contradicts {setting}: both decide {what}")


def rewards_of_environments(profile: Profile) -> Iterator[Complaint]:
    """The reward of an environment needs one."""
    if any(reward.name == "environment" for reward in profile.rewards) and not slot_settings(profile, "episodes"):
        text = 'rewards.name = "environment" is the reward of an environment, and the profile has none: set agent'
        yield Complaint("rewards.name", text)


def slot_settings(profile: Profile, slot: str) -> list[str]:
    """Return the settings that decide what is in a slot; none if the run itself decides."""
    return [claim[slot] for claim in SLOTS_OF(profile) if slot in claim]


def has_own_groups(profile: Profile) -> bool:
    """Whether a run makes its groups itself, from its dataset and with its rewards."""
    return not slot_settings(profile, "groups")


def rules_without_effect() -> tuple[Rule, ...]:
    """Return `NO_EFFECT` with the rows of attachments."""
    return (*NO_EFFECT, *ATTACHED_NO_EFFECT())


def contradictions() -> tuple[Rule, ...]:
    """Return `CONTRADICTIONS` with the rows of attachments."""
    return (*CONTRADICTIONS, *ATTACHED_CONTRADICTIONS())
