"""Generates the reference of messages on docs/messages.md from the structs in `protocols`.

python -m tests.docs.message_reference
"""

from __future__ import annotations

import ast
import inspect

import msgspec
from msgspec import Struct

from protocols.checkpoint import Part
from protocols.evaluation import EvalReport
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup, ScoredGroup, TeacherTokens
from protocols.sampling import Completion, SampleRequest, Sampling
from protocols.step import FirstBatch, GroupsEnded, PolicyUpdated, StepReport, TrainedGroup, UpdateMetrics, WeightsReady
from tests.docs.pages import DOCS, replace_between

PAGE = DOCS / "messages.md"
MESSAGES: tuple[type[Struct], ...] = (
    Prompt,
    Problem,
    RolloutGroup,
    Completion,
    Discarded,
    ScoredGroup,
    TeacherTokens,
    StepReport,
    TrainedGroup,
    UpdateMetrics,
    GroupsEnded,
    FirstBatch,
    EvalReport,
    PolicyUpdated,
    Part,
    WeightsReady,
    SampleRequest,
    Sampling,
)


def reference() -> str:
    """One section per message: its description and a table of its fields."""
    return "\n\n".join(_section(message) for message in MESSAGES)


def _section(message: type[Struct]) -> str:
    description = inspect.cleandoc(message.__doc__ or "")
    summary, _, details = description.partition("\n\n")
    rows = [
        f"| `{field.name}` | `{_type(message, field.name)}` | {_default(field)} |"
        for field in msgspec.structs.fields(message)
    ]
    parts = [f"### {message.__name__}", f"`{message.__module__}`. {summary.replace(chr(10), ' ')}"]
    if details:
        parts.append(f"```text\n{details}\n```")
    return "\n\n".join([*parts, "\n".join(["| field | type | default |", "|---|---|---|", *rows])])


def _type(message: type[Struct], name: str) -> str:
    """The annotation as written, without `Annotated` metadata."""
    for parent in message.__mro__:
        annotation = vars(parent).get("__annotations__", {}).get(name)
        if annotation is not None:
            plain = _WithoutMetadata().visit(ast.parse(str(annotation), mode="eval"))
            return ast.unparse(plain).replace("|", "\\|")
    raise ValueError(f"{message.__name__} has no field {name}")


class _WithoutMetadata(ast.NodeTransformer):
    """Replaces each `Annotated[type, ...]` by its type."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        is_annotated = isinstance(node.value, ast.Name) and node.value.id == "Annotated"
        return node.slice.elts[0] if is_annotated and isinstance(node.slice, ast.Tuple) else node


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{type(value).__name__}()`" if isinstance(value, Struct) else f"`{value!r}`"


if __name__ == "__main__":
    replace_between(PAGE, "messages", reference())
