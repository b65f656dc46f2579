"""The chat template: tags that it opens, the token that ends a turn, whether earlier turns stay, and tools are shown.

The checks render short conversations and compare tokens. What is only wrong for conversations of several turns is a
finding only for runs that have any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from clotho.models.tokenizer import ChatTokenizer
from clotho.rewards.answer import ANSWER, ANSWER_END, THINK, THINK_END
from clotho.rewards.registry import built_in
from protocols.errors import RequestError, visible
from protocols.finding import CHECK, Change, Finding, Remedy
from protocols.prompt import Problem
from training_run.profile.rules import has_own_groups
from training_run.profile.schema import Profile
from training_run.rewards.runner import expects_tag

Message = Mapping[str, str]

QUESTION: Message = {"role": "user", "content": "What is 1 + 1?"}
THOUGHT, REPLY = "add", "2"
ANSWERED: Message = {"role": "assistant", "content": REPLY}
REASONED: Message = {"role": "assistant", "content": f"{THINK}{THOUGHT}{THINK_END}{REPLY}"}
NEXT: Message = {"role": "user", "content": "And 2 + 2?"}

NO_THINKING: Sequence[Mapping[str, Any]] = ({"enable_thinking": False}, {"thinking": False})
"""Variables with which templates stop to open a thought, by family of models."""

HERMES, TURN_OF_CHATML = "tools-hermes", "<|im_start|>"
"""The shipped template that shows tools, and what the templates of the models contain that it suits."""

CLOSING = {THINK: THINK_END, ANSWER: ANSWER_END}


class TemplateReport(Struct, frozen=True, kw_only=True):
    """What a chat template does. findings: problems. facts: result of each check, in words, by name of the check."""

    findings: tuple[Finding, ...]
    facts: dict[str, str]


class TemplateUse(Struct, frozen=True, kw_only=True):
    """How a run uses the template. rewards: names of its rewards that expect tags.

    several_turns: whether conversations have any. stop_token_ids: `sampling.stop_token_ids`.
    tools: those of a problem; empty if no problem has any. problems, with_tools: number of problems, and of those with
    tools.
    """

    rewards: tuple[str, ...]
    several_turns: bool
    stop_token_ids: tuple[int, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    problems: int = 0
    with_tools: int = 0


def check_template(tokenizer: ChatTokenizer, use: TemplateUse) -> TemplateReport:
    """Check the chat template of a tokenizer. A conversation that the template refuses leaves its checks out."""
    findings: list[Finding] = []
    facts: dict[str, str] = {}
    for name, check in CHECKS:
        try:
            fact, found = check(tokenizer, use)
        except RequestError as error:
            fact, found = f"not checked: {error}", []
        facts[name] = fact
        findings += found
    return TemplateReport(findings=tuple(findings), facts=facts)


def opened_tags(tokenizer: ChatTokenizer, variables: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the tags that the generation prompt opens and leaves open."""
    prompt = tokenizer.render_chat([QUESTION], variables=variables)
    without = tokenizer.render_chat([QUESTION], variables=variables, add_generation_prompt=False)
    tail = tokenizer.decode(prompt[_common(prompt, without) :], skip_special_tokens=False)
    return tuple(tag for tag, closing in CLOSING.items() if tail.count(tag) > tail.count(closing))


def _expecting(tag: str) -> frozenset[str]:
    """Return the built-in rewards that are 0 for every completion that lacks an opening tag."""
    reading = [name for name, reward in built_in().items() if reward.reads_answer] if tag == ANSWER else []
    return frozenset({"format", *reading})


def _opened(tokenizer: ChatTokenizer, use: TemplateUse) -> tuple[str, list[Finding]]:
    opened = opened_tags(tokenizer)
    found = []
    for tag in opened:
        if rewards := [name for name in dict.fromkeys(use.rewards) if name in _expecting(tag)]:
            closed = [variables for variables in NO_THINKING if tag not in opened_tags(tokenizer, variables)]
            switch = f"set model.chat_template_kwargs = {_inline(closed[0])}, or " if closed else ""
            found.append(
                Finding(
                    name="template_opens_tag",
                    severity="error",
                    fact=f"the chat template ends every prompt with {tag}, and completions lack this tag",
                    consequence=f"{_listed(rewards)} 0 for every completion, because completions must contain {tag}",
                    advice=f"{switch}name a template that does not open {tag} in model.chat_template, or replace the "
                    f"rewards in [[rewards]]: {', '.join(rewards)}",
                    remedy=_with_variables(closed[0]) if closed else CHECK,
                )
            )
    return f"the generation prompt opens {', '.join(opened) or 'no tag'}", found


def _with_variables(variables: Mapping[str, Any]) -> Remedy:
    return Remedy(action="start", changes=(Change(key="model.chat_template_kwargs", value=_inline(variables)),))


def _ended(tokenizer: ChatTokenizer, use: TemplateUse) -> tuple[str, list[Finding]]:
    """Compare the control tokens after the content of a turn with the tokens that end a completion."""
    turn = [QUESTION, ANSWERED]
    whole = tokenizer.render_chat(turn, add_generation_prompt=False)
    content = tokenizer.render_chat(turn, add_generation_prompt=False, continue_final_message=True)
    after = whole[_common(whole, content) :]
    ends = tokenizer.eos_ids | set(use.stop_token_ids)
    if ended := [token for token in after if token in ends]:
        return f"a turn ends with {_named(tokenizer, ended[0])}, which ends a completion", []
    control = [token for token in after if not tokenizer.decode([token])]
    known = ", ".join(_named(tokenizer, token) for token in sorted(ends)[:4]) or "none"
    if not control:
        return f"the template writes no control token after a turn; completions end with {known}", []
    named = _named(tokenizer, control[0])
    finding = Finding(
        name="end_token_mismatch",
        severity="error",
        fact=f"the chat template ends a turn with {named}, and completions end only with {known}",
        consequence="the model continues after its answer until sampling.max_tokens, so that completions are truncated",
        advice=f"add {control[0]} to eos_token_id in generation_config.json of the model, or set "
        f"sampling.stop_token_ids = [{control[0]}]",
        remedy=Remedy(
            action="start",
            changes=(Change(key="sampling.stop_token_ids", value=str([*use.stop_token_ids, control[0]])),),
        ),
    )
    return f"a turn ends with {named}, which does not end a completion", [finding]


def _kept(tokenizer: ChatTokenizer, use: TemplateUse) -> tuple[str, list[Finding]]:
    """Compare a prompt of two turns with the prompt and the completion of the first turn."""
    prompt = tokenizer.render_chat([QUESTION])
    following = tokenizer.render_chat([QUESTION, ANSWERED, NEXT])
    sampled = (*prompt, *tokenizer.encode(REPLY, add_special_tokens=False))
    extends = following[: len(sampled)] == sampled
    text = tokenizer.decode(tokenizer.render_chat([QUESTION, REASONED, NEXT]), skip_special_tokens=False)
    round_trip = tokenizer.decode(tokenizer.encode(REASONED["content"], add_special_tokens=False))
    drops = THOUGHT in round_trip and THOUGHT not in text
    found = []
    if use.several_turns and drops:
        found.append(
            Finding(
                name="template_drops_thinking",
                fact=f"the chat template removes {THINK}...{THINK_END} from earlier turns of a conversation",
                consequence="the prompt of a later turn is not what the policy sampled, so that its log-probabilities "
                "differ, and the prefix cache is not used",
                advice="name a template that keeps the content of earlier turns in model.chat_template",
            )
        )
    if use.several_turns and not extends and not drops:
        found.append(
            Finding(
                name="template_rewrites_history",
                fact="the prompt of a turn does not extend the prompt and the completion of the turn before it",
                consequence="the policy is trained on other tokens than it sampled in earlier turns, and the prefix "
                "cache is not used",
                advice="name a template that writes earlier turns as they were sampled in model.chat_template",
            )
        )
    thinking = "removes thoughts of earlier turns" if drops else "keeps thoughts of earlier turns"
    relevant = "" if use.several_turns else " (without effect: no conversation has several turns)"
    extension = "turn k+1 extends turn k" if extends else "turn k+1 does not extend turn k"
    return f"{extension}; the template {thinking}{relevant}", found


def _shown(tokenizer: ChatTokenizer, use: TemplateUse) -> tuple[str, list[Finding]]:
    """Compare a prompt with the tools of a problem and the same prompt without them."""
    if not use.tools:
        return "no problem has any", []
    if tokenizer.render_chat([QUESTION], tools=use.tools) != tokenizer.render_chat([QUESTION]):
        return f"shown in the prompts of {use.with_tools} problems", []
    is_chatml = TURN_OF_CHATML in tokenizer.chat_template
    change = Remedy(action="start", changes=(Change(key="model.chat_template", value=HERMES),))
    finding = Finding(
        name="tools_not_shown",
        severity="error" if use.with_tools == use.problems else "warning",
        fact=f"{use.with_tools} of {use.problems} problems have tools, and the chat template does not show them",
        consequence="the policy does not know the functions that it shall call",
        advice=f"set model.chat_template = {HERMES}, which suits models of the ChatML format, or name a template that "
        "renders tools",
        remedy=change if is_chatml else CHECK,
    )
    return "not shown", [finding]


CHECKS = (("opened tags", _opened), ("end token", _ended), ("earlier turns", _kept), ("tools", _shown))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of equal tokens at the start."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def _named(tokenizer: ChatTokenizer, token: int) -> str:
    return f"{visible(tokenizer.token_text(token), 40)} ({token})"


def _inline(variables: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {str(value).lower()}" for name, value in variables.items()) + "}"


def _listed(rewards: Sequence[str]) -> str:
    return f"the reward{'s' if len(rewards) > 1 else ''} {', '.join(rewards)} {'are' if len(rewards) > 1 else 'is'}"


def template_use(profile: Profile, problems: Sequence[Problem]) -> TemplateUse:
    """Return how the run of a profile uses the chat template."""
    environments = not has_own_groups(profile)
    answered = any(message.get("role") == "assistant" for problem in problems for message in problem.messages)
    tools = [] if environments else [problem.tools for problem in problems if problem.tools]
    return TemplateUse(
        rewards=() if environments else tuple(reward.name for reward in profile.rewards if expects_tag(reward)),
        several_turns=environments or answered,
        stop_token_ids=profile.sampling.stop_token_ids,
        tools=tools[0] if tools else (),
        problems=len(problems),
        with_tools=len(tools),
    )
