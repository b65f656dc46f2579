"""The budget of a chat template: what each operation of Jinja costs, charged before it is computed.

Every result is charged in proportion to its size: `'a' * 10**9` fails before it takes memory. Values that nest the same
list several times are charged for their size as a tree, so that neither text nor comparisons of them can explode.
"""

from __future__ import annotations

import re
import string
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateRuntimeError

STEP = 64
"""Work units of one call or loop iteration. A character costs 2."""

NODE = 24
"""Work units of one element of a nested value."""

MAX_INTEGER_BITS = 4096
MAX_WIDTH = 9999
"""Largest width, indentation and precision in formats and filters."""

CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)

CHEAP_FILTERS = frozenset({"abs", "attr", "count", "d", "default", "first", "float", "last", "length", "safe"})
SHALLOW_FILTERS = frozenset({"items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"})
MATERIALIZING_FILTERS = frozenset({"groupby", "join", "max", "min", "sort", "sum", "unique"})
SORTING_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
REFUSED_METHODS = frozenset({"encode", "maketrans", "to_bytes", "translate"})
NAMED_TESTS = frozenset({"!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le"})
COMPARING_TESTS = NAMED_TESTS | {"lessthan", "lower", "lt", "ne", "upper"}


class WorkLimitError(TemplateRuntimeError):
    """A chat template exceeds its budget of work or output."""


class Budget:
    """Work units that a rendering may still use."""

    def __init__(self, units: int) -> None:
        self.left = units


BUDGET: ContextVar[Budget] = ContextVar("chat template budget")


def spend(units: int) -> None:
    """Take work units from the budget. Raises WorkLimitError."""
    budget = BUDGET.get()
    budget.left -= units
    if budget.left < 0:
        raise WorkLimitError("it exceeds the limit on loop iterations and text size")


def units(value: Any, *, shallow: bool) -> int:
    """Work units of copying a value, or of writing it as text; of a container only its own elements if `shallow`.

    The budget is charged while elements are counted, so that the count itself is bounded.
    """
    if isinstance(value, str):
        return 2 * len(value)
    if isinstance(value, range):
        return NODE * len(value)
    if not isinstance(value, CONTAINERS):
        return 2
    if shallow:
        return STEP + NODE * len(value)
    return size_and_depth(value)[0]


def size_and_depth(value: Any) -> tuple[int, int]:
    """Work units of a nested value, and the depth of its nesting."""
    units, deepest, pending = 0, 0, [(value, 1)]
    limit = BUDGET.get().left
    while pending:
        item, depth = pending.pop()
        units, deepest = units + NODE, max(deepest, depth)
        if isinstance(item, str):
            units += 2 * len(item)
        elif isinstance(item, dict | ItemsView):
            pending += [
                (part, depth + 1) for pair in (item.items() if isinstance(item, dict) else item) for part in pair
            ]
        elif isinstance(item, CONTAINERS):
            pending += [(part, depth + 1) for part in item]
        if units > limit:
            spend(units)
    return units, deepest


def charge(*values: Any, shallow: bool = False, times: int = 1) -> None:
    """Charge copies of values: `times` times each."""
    for value in values:
        spend(times * units(value, shallow=shallow))


def require_narrow(width: Any) -> None:
    """Raise WorkLimitError if `width` is a large number."""
    if isinstance(width, int) and abs(width) > MAX_WIDTH:
        raise WorkLimitError(f"it uses a width of more than {MAX_WIDTH}")


def charge_percent_format(text: str, values: Any) -> None:
    """Charge `text % values`."""
    if re.search(r"%[^%a-zA-Z]*(\*|\d{5})", text):
        raise WorkLimitError("it formats with a variable or large width")
    fields = text.count("%")
    spend(2 * len(text) + 200 * fields + 2 * MAX_WIDTH * len(re.findall(r"\d{3}", text)))
    charge(values, times=fields)


def charge_brace_format(text: str, values: Any) -> None:
    """Charge `text.format(...)`."""
    fields = 0
    for _, name, spec, _ in string.Formatter().parse(text):
        fields += name is not None
        if spec and ("{" in spec or re.search(r"\d{5}", spec)):
            raise WorkLimitError("it formats with a variable or large width")
    spend(2 * len(text) + 200 * fields + 2 * MAX_WIDTH * len(re.findall(r"\d{3}", text)))
    charge(values, times=fields)


def charge_replace(text: str, old: Any = "", new: Any = "", *_: Any) -> None:
    """Charge `text.replace(old, new)`."""
    if isinstance(old, str) and isinstance(new, str):
        spend(2 * (len(text) + (text.count(old) if old else len(text) + 1) * len(new)))


def charge_text_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Charge a call of a method of str."""
    if name in REFUSED_METHODS:
        raise WorkLimitError(f"it calls {name}, which is not permitted")
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        for width in args[:1]:
            require_narrow(width)
        spend(2 * len(text) + 2 * MAX_WIDTH * (1 + text.count("\t") if name == "expandtabs" else 1))
    elif name == "replace":
        charge_replace(text, *args)
    elif name == "join" and args:
        elements = args[0]
        if isinstance(elements, (*CONTAINERS, str)):
            spend(2 * len(text) * len(elements))
            charge(elements)
        else:
            raise WorkLimitError("it joins a sequence of unknown length; use the filter join")
    else:
        spend(4 * len(text))
        charge(*args)


def charge_filter(name: str, values: list[Any], kwargs: dict[str, Any]) -> None:
    """Charge a filter. values: its value and positional arguments."""
    options = [*values[1:], *kwargs.values()]
    if name in ("center", "indent", "round", "tojson", "truncate"):
        for option in options:
            require_narrow(option)
    if name in CHEAP_FILTERS or not values:
        return
    if name in SHALLOW_FILTERS:
        charge(values[0], shallow=True)
        charge(*options)
    elif name in CHARGES:
        CHARGES[name](values[0], options)
    else:
        charge(*values, *options, times=20 if name in SORTING_FILTERS else 3)


def _charge_sum(value: Any, options: list[Any]) -> None:
    charge(value, *options, times=3)
    if any(isinstance(option, (*CONTAINERS, str)) for option in options[-1:]) and not isinstance(options[-1], str):
        raise WorkLimitError("it sums values other than numbers")


def _charge_join(value: Any, options: list[Any]) -> None:
    spend(sum(units(option, shallow=False) for option in options) * (1 + len(value)))
    charge(value)


def _charge_indent(value: Any, options: list[Any]) -> None:
    width = sum(option if isinstance(option, int) else len(str(option)) for option in options) + 4
    charge(value)
    spend(2 * width * (1 + len(str(value).splitlines())))


def _charge_center(value: Any, options: list[Any]) -> None:
    charge(value)
    spend(2 * MAX_WIDTH)


def _charge_replace_filter(value: Any, options: list[Any]) -> None:
    charge(value, times=3)
    charge_replace(str(value), *options)


def _charge_json(value: Any, options: list[Any]) -> None:
    """Charge JSON text with these options of the filter `tojson`."""
    units, depth = size_and_depth(value)
    wide = sum(option if isinstance(option, int) else len(str(option)) for option in options)
    spend(units * (6 + wide * depth))


CHARGES = {
    "center": _charge_center,
    "format": lambda value, options: charge_percent_format(str(value), options),
    "indent": _charge_indent,
    "join": _charge_join,
    "replace": _charge_replace_filter,
    "sum": _charge_sum,
    "tojson": _charge_json,
}
"""Charges of filters whose results can be much longer than their values."""


def counted(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values; each is a step of work."""
    for value in values:
        spend(STEP)
        yield value


def charge_product(left: Any, right: Any) -> None:
    """Charge `left * right`."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
            raise WorkLimitError("it computes integers that are too large")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (*CONTAINERS, str)) and isinstance(times, int):
            charge(sequence, times=max(times, 1))


def require_small_power(base: Any, exponent: Any) -> None:
    """Raise WorkLimitError if the integer `base ** exponent` has too many digits."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_INTEGER_BITS:
        raise WorkLimitError("it computes integers that are too large")
