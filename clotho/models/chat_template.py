"""Chat templates: conversations to text, with bounded work.

A chat template is a program in the Jinja language that a model brings along. It is rendered as the library
`transformers` renders it, in Jinja's sandbox, with one addition: every loop iteration, call, filter and operator is
charged to a budget before it is computed, in proportion to the size of its result. A template that exceeds the budget
ends with an error. The work and the memory of a rendering are bounded, and no thread has to be interrupted.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, Undefined, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from clotho.models.template_budget import (
    BUDGET,
    COMPARING_TESTS,
    CONTAINERS,
    MATERIALIZING_FILTERS,
    REFUSED_METHODS,
    STEP,
    Budget,
    WorkLimitError,
    charge,
    charge_brace_format,
    charge_filter,
    charge_percent_format,
    charge_product,
    charge_text_method,
    counted,
    require_small_power,
    size_and_depth,
    spend,
)

MAX_TEMPLATE_CHARACTERS = 300_000
MAX_OUTPUT_CHARACTERS = 2_000_000
"""Length of a rendered conversation beyond four times the length of its messages."""

WORK = 64_000_000
"""Work units of a rendering: a few seconds of loop iterations, or 32 million characters of text."""

WORK_PER_INPUT = 32
"""Further work units per unit of the messages."""

REMOVED_FILTERS = ("batch", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
"""Filters of Jinja with results of unbounded size or chance; chat templates do not use them."""


class ChatTemplate:
    """A compiled chat template. Thread-safe."""

    def __init__(self, source: str) -> None:
        """Raises TemplateError, RecursionError or SyntaxError if the template cannot be compiled."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError(f"it has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are permitted")
        BUDGET.set(Budget(WORK))
        self._template = _Environment().from_string(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """Render a conversation. variables: further names that the template may use, such as `tools`.

        Raises WorkLimitError, and every exception that the template causes.
        """
        BUDGET.set(Budget(2**62))
        size = sum(size_and_depth(value)[0] for value in (*messages, variables.get("tools", [])))
        BUDGET.set(Budget(WORK + WORK_PER_INPUT * size))
        left = MAX_OUTPUT_CHARACTERS + 2 * size
        chunks = []
        for chunk in self._template.generate(
            **{
                "messages": [_with_reasoning_names(message) for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            }
        ):
            left -= len(chunk)
            if left < 0:
                raise WorkLimitError("its output is too long")
            chunks.append(chunk)
        return "".join(chunks)


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Give the reasoning of a message under each name that templates read, as `transformers` does."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in ("reasoning_content", "thinking", "reasoning") if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _wrap_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with its charge before it. Arguments that Jinja passes itself come first and are no text."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        spend(STEP)
        values = list(args[skipped:])
        if name in MATERIALIZING_FILTERS and values and not isinstance(values[0], (*CONTAINERS, str, Undefined)):
            values[0] = list(counted(values[0]))
        charge_filter(name, values, kwargs)
        return function(*args[:skipped], *values, **kwargs)

    return charged


def _wrap_test(name: str, function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        spend(STEP)
        if name in COMPARING_TESTS:
            charge(*args, *kwargs.values())
        return function(*args, **kwargs)

    return charged


@pass_context
def _charged_output(context: Context, value: Any) -> Any:
    """Charge a value that becomes part of the output, or of the text of a macro or block."""
    charge(value)
    return value


class _ChargeNodes(NodeTransformer):
    """Rewrites a template so that the operations that Jinja's sandbox cannot intercept are charged too."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Charge constant text at run time, because a loop can repeat it."""
        self.generic_visit(node)
        node.nodes = [
            nodes.MarkSafeIfAutoescape(nodes.Const(child.data)) if isinstance(child, nodes.TemplateData) else child
            for child in node.nodes
        ]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count iterations."""
        self.generic_visit(node)
        node.iter = _call("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Charge the operator `~`."""
        self.generic_visit(node)
        return _call("concatenated", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Charge slices."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _call("sliced", node.node)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Charge comparisons."""
        self.generic_visit(node)
        node.expr = _call("charged", node.expr)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _call("charged", operand.expr)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """Charge a new list."""
        self.generic_visit(node)
        return _call("charged", node) if not all(isinstance(item, nodes.Const) for item in node.items) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Charge a new tuple."""
        self.generic_visit(node)
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return _call("charged", node) if node.ctx == "load" and not constant else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """Charge a new dictionary."""
        self.generic_visit(node)
        return _call("charged", node)


def _call(method: str, *arguments: Any) -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


class _ChargingGenerator(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Rewrite the template before its code is generated."""
        tree = _ChargeNodes().visit(node)
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


class _Dict:
    """The function `dict` of templates."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """Return a dictionary with equal values."""
        return dict.fromkeys(counted(keys), value)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the names that chat templates use, and a charge on every operation."""

    code_generator_class = _ChargingGenerator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols], cache_size=0
        )
        self.finalize = _charged_output
        self.filters["tojson"] = _to_json
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: _wrap_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _wrap_test(name, function) for name, function in self.tests.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _time_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Count the iterations of a loop."""
        return counted(values)

    def concatenated(self, *values: Any) -> str:
        """Return the text of all values."""
        charge(*values)
        return str_join(values)

    def sliced(self, value: Any) -> Any:
        """Charge a copy of a list or string."""
        charge(value, shallow=True)
        return value

    def charged(self, value: Any) -> Any:
        """Charge a value and return it."""
        charge(value)
        return value

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Charge a call, then call the function if the sandbox permits it."""
        spend(STEP)
        owner = getattr(function, "__self__", None)
        if owner is not self and not isinstance(function, Macro | BlockReference):
            if isinstance(function, LoopContext) and args:
                args = (counted(args[0]), *args[1:])
            elif isinstance(owner, str) and isinstance(function, BuiltinMethodType):
                charge_text_method(owner, function.__name__, (*args, *kwargs.values()))
            elif getattr(function, "__name__", "") in REFUSED_METHODS:
                raise WorkLimitError(f"it calls {function.__name__}, which is not permitted")
            else:
                if isinstance(owner, CONTAINERS):
                    charge(owner, shallow=function.__name__ not in ("count", "index"))
                charge(*args, *kwargs.values())
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge an operation in proportion to its result, then compute it."""
        if operator == "%" and isinstance(left, str):
            charge_percent_format(left, right)
        elif operator == "*":
            charge_product(left, right)
        elif operator == "**":
            require_small_power(left, right)
        else:
            charge(left, right, times=3)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` or `str.format_map` with the checks of the sandbox and a charge."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def charged(*args: Any, **kwargs: Any) -> str:
            charge_brace_format(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return charged


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
    if len(layout) > 200 or re.search(r"\d{3}", layout):
        raise WorkLimitError("its format of the time is too long")
    return datetime.now().strftime(layout)
