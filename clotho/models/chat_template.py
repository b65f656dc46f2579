"""Chat templates: conversations to text, with a limit on steps and on output.

A chat template is a program in the Jinja language that a model brings along. It is rendered in Jinja's sandbox, as the
library `transformers` renders it. Loop iterations and calls are counted, so that an endless template ends with an
error; the result of a product or a sum, and the output, have a largest length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARACTERS = 300_000
MAX_CHARACTERS = 2_000_000
"""Length of a rendered conversation, and of a value that a template computes, beyond that of its messages."""

MAX_STEPS = 200_000
"""Loop iterations and calls of a rendering, beyond `STEPS_PER_CHARACTER`: a second at most."""
STEPS_PER_CHARACTER = 2

MAX_INTEGER_BITS = 4096


class WorkLimitError(TemplateRuntimeError):
    """A rendering exceeds a limit."""


class _Limits:
    """What a rendering may still do. characters: the largest length of a value."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: object) -> None:
        size = len(json.dumps([messages, tools], default=str, ensure_ascii=False))
        self.characters, self._steps = MAX_CHARACTERS + 4 * size, MAX_STEPS + STEPS_PER_CHARACTER * size

    def step(self) -> None:
        """Count a loop iteration or a call. Raises WorkLimitError."""
        self._steps -= 1
        if self._steps < 0:
            raise WorkLimitError("it exceeds the limit on loop iterations and calls")

    def require(self, length: int) -> None:
        """Raise WorkLimitError for a value that is too long."""
        if length > self.characters:
            raise WorkLimitError("it computes a text that is too long")


_limits: ContextVar[_Limits] = ContextVar("limits of a rendering")


class ChatTemplate:
    """A compiled chat template. Thread-safe."""

    def __init__(self, source: str) -> None:
        """Raises TemplateError, RecursionError or SyntaxError if the template cannot be compiled."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError(f"it has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are permitted")
        _limits.set(_Limits([], None))
        self._template = _Environment().from_string(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """Render a conversation with further names. Raises WorkLimitError, and what the template raises."""
        limits = _Limits(messages, variables.get("tools"))
        _limits.set(limits)
        chunks, length = [], 0
        for chunk in self._template.generate(
            **{
                "messages": [_with_reasoning_names(message) for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            }
        ):
            length += len(chunk)
            limits.require(length)
            chunks.append(chunk)
        return "".join(chunks)


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Give the reasoning of a message under each name that templates read, as `transformers` does."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in ("reasoning_content", "thinking", "reasoning") if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


class _CountedNodes(NodeTransformer):
    """Rewrites what Jinja's sandbox does not intercept: loops, and the operator `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count iterations."""
        self.generic_visit(node)
        node.iter = _call("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Limit the text."""
        self.generic_visit(node)
        return _call("concatenated", *node.nodes)


def _call(method: str, *arguments: Any) -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


class _CountingGenerator(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Rewrite the template before its code is generated."""
        tree = _CountedNodes().visit(node)
        tree.set_environment(self.environment)
        super().visit_Template(tree, frame)


class _Generation(Extension):
    """The tag `generation`, which marks the text of assistants for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag as a call with its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    def render_body(self, caller: Macro) -> Any:
        """Return the text of the body."""
        return caller()


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateRuntimeError("names of a namespace must not start with an underscore")
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the names that chat templates use."""

    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols], cache_size=0
        )
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _time_now, "namespace": _Namespace}

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Count the iterations of a loop."""
        limits = _limits.get()
        for value in values:
            limits.step()
            yield value

    def concatenated(self, *values: Any) -> str:
        """Return the text of all values."""
        _limits.get().require(sum(len(value) for value in values if isinstance(value, str)))
        return str_join(values)

    def call(self, context: Context, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Count a call, then call the function if the sandbox permits it."""
        _limits.get().step()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Limit the length of the result, then compute it."""
        limits, numbers = _limits.get(), isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and left.bit_length() * abs(right) > MAX_INTEGER_BITS:
            raise WorkLimitError("it computes integers that are too large")
        if operator == "*" and numbers and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
            raise WorkLimitError("it computes integers that are too large")
        if operator == "*" and not numbers:
            for sequence, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(sequence, "__len__"):
                    limits.require(len(sequence) * times)
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            limits.require(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _time_now(layout: str) -> str:
    return datetime.now().strftime(layout)
