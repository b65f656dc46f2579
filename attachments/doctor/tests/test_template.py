"""The chat template is rendered, and its tokens are compared."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from attachments.atropos.sections import ATROPOS, MockSource
from attachments.doctor.template import TemplateUse, check_template, opened_tags, template_use
from attachments.doctor.tests import templates
from clotho.settings.model import ModelSection
from protocols.prompt import Problem
from training_run.profile.data import DataSection, RewardSection
from training_run.profile.schema import Profile

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
SINGLE = TemplateUse(rewards=("format", "math_eval"), several_turns=False)
SEVERAL = TemplateUse(rewards=("format",), several_turns=True)


def names(template: str, use: TemplateUse, *, eos: str = "<|im_end|>") -> list[str]:
    """The names of the findings."""
    return [finding.name for finding in check_template(templates.tokenizer(template, eos=eos), use).findings]


def test_a_template_that_keeps_turns_and_opens_no_tag_has_no_finding() -> None:
    """Four checks were made."""
    report = check_template(templates.tokenizer(), SEVERAL)
    assert report.findings == ()
    assert list(report.facts) == ["opened tags", "end token", "earlier turns", "tools"]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [(("format",), ["template_opens_tag"]), (("math_eval",), []), (("my.py:reward",), []), ((), [])],
)
def test_an_opened_tag_matters_to_rewards_that_expect_it(rewards: tuple[str, ...], expected: list[str]) -> None:
    """`math_eval` does not read thoughts, and what a function of the user expects is unknown."""
    assert names(templates.OPENS_THINK, TemplateUse(rewards=rewards, several_turns=False)) == expected


def test_the_advice_names_the_variable_that_closes_the_tag() -> None:
    """If the template has none, the advice names another template and the rewards."""
    (switch,) = check_template(templates.tokenizer(templates.THINKS_UNLESS_TOLD), SINGLE).findings
    assert "model.chat_template_kwargs = {thinking = false}" in switch.advice
    (fixed,) = check_template(templates.tokenizer(templates.OPENS_THINK), SINGLE).findings
    assert "chat_template_kwargs" not in fixed.advice
    assert opened_tags(templates.tokenizer(templates.OPENS_THINK)) == ("<think>",)


def test_a_turn_that_does_not_end_with_an_end_token_is_a_finding() -> None:
    """Unless the profile lists the token in `sampling.stop_token_ids`."""
    wrong = templates.tokenizer(eos="<|endoftext|>")
    (finding,) = check_template(wrong, SINGLE).findings
    (end,) = templates.tokenizer().eos_ids
    assert finding.name == "end_token_mismatch"
    assert f"stop_token_ids = [{end}]" in finding.advice
    stopped = TemplateUse(rewards=(), several_turns=False, stop_token_ids=(end,))
    assert check_template(wrong, stopped).findings == ()


@pytest.mark.parametrize(
    ("template", "expected"),
    [(templates.DROPS_THINKING, "template_drops_thinking"), (templates.REWRITES, "template_rewrites_history")],
)
def test_changed_turns_matter_to_conversations_of_several_turns(template: str, expected: str) -> None:
    """With one turn there is no earlier turn."""
    assert names(template, SEVERAL) == [expected]
    assert names(template, SINGLE) == []


def test_a_template_that_refuses_a_conversation_leaves_checks_out() -> None:
    """The start is not refused by a check."""
    use = replace(SEVERAL, tools=(TOOL,), problems=1, with_tools=1)
    report = check_template(templates.tokenizer("{{ raise_exception('no') }}"), use)
    assert report.findings == ()
    assert all(fact.startswith("not checked") for fact in report.facts.values())


@pytest.mark.parametrize(("with_tools", "severity"), [(3, "error"), (2, "warning")])
def test_tools_that_the_template_does_not_show_are_a_finding(with_tools: int, severity: str) -> None:
    """Of a model of the ChatML format, the shipped template shows them."""
    use = TemplateUse(rewards=(), several_turns=False, tools=(TOOL,), problems=3, with_tools=with_tools)
    (finding,) = check_template(templates.tokenizer(), use).findings
    assert (finding.name, finding.severity, finding.remedy.action) == ("tools_not_shown", severity, "start")
    assert [(change.key, change.value) for change in finding.remedy.changes] == [
        ("model.chat_template", "tools-hermes")
    ]
    shown = templates.HEALTHY + "{% if tools %}{{ tools }}{% endif %}"
    assert names(shown, use) == []
    assert names(templates.HEALTHY, SINGLE) == []


def test_the_tools_of_a_run_are_those_of_its_problems() -> None:
    """Environments send prompts of their own."""
    plain = Problem(prompt="a", answer="", type="t")
    problems = [plain, Problem(prompt="b", answer="", type="t", tools=(TOOL,))]
    own = Profile(model=ModelSection(path="base"), data=DataSection(train=""), rewards=(RewardSection(name="exact"),))
    environments = ATROPOS.put(own, MockSource())
    use = template_use(own, problems)
    assert (use.tools, use.problems, use.with_tools) == ((TOOL,), 2, 1)
    assert template_use(environments, problems).tools == ()
