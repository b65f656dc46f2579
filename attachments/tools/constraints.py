"""Constrained decoding with the library llguidance: grammars to sets of tokens.

The library intersects the vocabulary with an Earley parser, so that every token keeps the completion a prefix of a
sentence of the grammar. Its work per token is limited (`LIMITS`): a grammar whose parser or lexer grows too much ends
its own request. Compilation is not limited by the library, and a thread cannot be ended: a grammar is compiled in a
process of its own first, which is killed when it has computed for `CHECK_SECONDS`, or holds `CHECK_BYTES`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer

from attachments.tools.tagged_text import COMPACT_JSON, TaggedText
from clotho.models.model_files import one_line
from protocols.constraints import Grammar
from protocols.errors import RequestError

MAX_GRAMMAR_BYTES = 65_536

MAX_WHITESPACE = 64
"""Maximum number of whitespace characters between two elements of JSON. Without a limit, a model may never end."""

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stub of the library only

LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of the library. A step takes at most about 20 ms, and the states of a lexer about 40 MB."""


FIRST_SECONDS, TOKEN_SECONDS = 0.25, 0.002
"""CPU time of a completion in the library: an allowance, and what each token adds. Common grammars need 0.05 ms."""

CHECK_SECONDS = 5
"""CPU time in which a grammar must compile, in whole seconds. On a busy machine this takes longer."""

CHECK_BYTES = 2**30
"""Resident memory in which a grammar must compile. It is read from outside, because macOS limits no address space."""

WATCH_SECONDS = 0.05
"""Time between two readings of the resident memory."""

WAIT_SECONDS = 120.0
"""Time after which a compilation is ended that does not use its CPU time."""

CHECK = """
import json, resource, sys
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

body = json.load(sys.stdin)
for kind, most in (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, body["seconds"]):
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
limits = LLParserLimits(**body["limits"])
matcher = LLMatcher(LLTokenizer("byte"), body["definition"], log_level=0, limits=limits)
matcher.compute_bitmask()
print(json.dumps(matcher.get_error()))
"""

TOKEN = re.compile(r"<\[\d+\]>")
"""A token by its number, in the syntax of grammars."""

THINK, END_THINK = "<think>", "</think>"


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, end_tokens: Collection[int], vocabulary: int) -> None:
        """tokenizer: a fast tokenizer of Hugging Face transformers. vocabulary: width of the logits.

        Raises ValueError if the library does not know tokenizers of this kind.
        """
        try:
            ends = sorted(token for token in end_tokens if token < vocabulary)
            self._tokenizer: LLTokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=ends)
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ValueError(f"the tokenizer permits no constrained decoding: {one_line(error)}") from error
        self._marks = {mark: _mark(tokenizer, mark) for mark in (THINK, END_THINK)}
        added = tokenizer.added_tokens_decoder.items()  # all have logits: the library refuses a narrower vocabulary
        self._special = {one.content: f"<[{token}]>" for token, one in added if one.special}

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar.

        Raises RequestError, which names the field, if the grammar is invalid, too large or without any sentence.
        """
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise _refused(grammar, f"it has more than {MAX_GRAMMAR_BYTES} bytes")
        try:
            definition = _definition(grammar, self._special)
            if grammar.reasoning != "none":
                definition = self._behind_reasoning(definition, is_open=grammar.reasoning == "open")
            _check(definition)
        except (ValueError, RecursionError) as error:
            raise _refused(grammar, one_line(error)) from error
        matcher = LLMatcher(self._tokenizer, definition, log_level=0, limits=LLParserLimits(**LIMITS))
        compiled = CompiledGrammar(matcher, grammar.param)
        first = compiled.start()
        if not any(first.allowed()) or first.error:
            raise _refused(grammar, first.error or "no token can begin a sentence of it")
        return compiled

    def _behind_reasoning(self, definition: str, *, is_open: bool) -> str:
        """Return the grammar of a text that may have a block of reasoning before the sentence, or begins inside one."""
        first, *rest = json.loads(definition)["grammars"]
        end = self._marks[END_THINK]
        block = f"thought {end} /\\n{{0,2}}/"
        rule = "thought: /(?s:.*)/"
        if end.startswith('"'):
            block, rule = "thought /\\n{0,2}/", f"thought[lazy]: /(?s:.*){re.escape(END_THINK)}/".replace("</", "<\\/")
        start = f"{block} @sentence" if is_open else f"({self._marks[THINK]} {block})? @sentence"
        top = {"lark_grammar": f"start: {start}\n{rule}\n"}
        return json.dumps({"grammars": [top, {**first, "name": "sentence"}, *rest]})


def _mark(tokenizer: Any, text: str) -> str:
    """Return a mark in the syntax of grammars: its token if it is one, else its text."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return f"<[{tokens[0]}]>" if len(tokens) == 1 else json.dumps(text)


class CompiledGrammar:
    """A compiled grammar, the start of every completion."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher, self._param = matcher, param

    def start(self) -> GrammarState:
        """Return the state of a new completion."""
        return GrammarState(self._matcher.deep_copy(), self._param)


class GrammarState:
    """The state of one completion."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher, self._param = matcher, param
        self._seconds_left = FIRST_SECONDS

    @property
    def error(self) -> str:
        """Why the library gave up; empty if it did not."""
        if self._matcher.is_error():
            return " ".join(self._matcher.get_error().split())
        return "its tokens take too long to compute" if self._seconds_left < 0.0 else ""

    def allowed(self) -> bytes:
        """Return the tokens that may follow. After an error, these are the end tokens, and `accept` raises it."""
        began = time.thread_time()
        bits = self._matcher.compute_bitmask()
        self._seconds_left += TOKEN_SECONDS - (time.thread_time() - began)
        return bits

    def accept(self, token: int, /) -> bool:
        """Advance by an allowed token; return whether nothing may follow. Raises RequestError."""
        began = time.thread_time()
        accepted = self._matcher.consume_token(token)
        self._seconds_left -= time.thread_time() - began
        if not accepted or self.error:
            message = f"{self._param}: the grammar exceeds a limit of constrained decoding: {self.error}"
            raise RequestError(message, param=self._param)
        return bool(self._matcher.is_stopped())


@lru_cache(maxsize=256)
def _check(definition: str) -> None:
    """Compile a grammar in a process of its own. Raises ValueError if it is invalid, too large or takes too long.

    The process uses a vocabulary of bytes: a larger one adds only work that `LIMITS` covers. Its first token stands for
    every token that the grammar names by its number.
    """
    body = json.dumps({"definition": TOKEN.sub("<[0]>", definition), "limits": LIMITS, "seconds": CHECK_SECONDS})
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-P", "-c", CHECK], text=True, **streams) as process:  # type: ignore[call-overload]
        try:
            output = _watched_output(process, body)
        finally:
            process.kill()
    if process.returncode == -signal.SIGXCPU:
        raise ValueError(f"it takes more than {CHECK_SECONDS} seconds of CPU time to compile")
    if process.returncode:
        raise ValueError("it needs too much memory to compile")
    if message := json.loads(output.splitlines()[-1]):
        raise ValueError("no text satisfies it" if "NoExtension" in message else " ".join(message.split()))


def _watched_output(process: subprocess.Popen[str], body: str) -> str:
    """Return what a process writes about its input. Raises ValueError if it exceeds its memory or its time."""
    until, given = time.monotonic() + WAIT_SECONDS, body
    while True:
        try:
            return process.communicate(given or None, timeout=WATCH_SECONDS)[0]
        except subprocess.TimeoutExpired:
            given = ""  # `communicate` continues with what was given at first
        with suppress(psutil.Error):
            if psutil.Process(process.pid).memory_info().rss > CHECK_BYTES:
                raise ValueError(f"it needs more than {CHECK_BYTES // 2**20} MB of memory to compile")
        if time.monotonic() > until:
            raise ValueError(f"it is not compiled after {WAIT_SECONDS:g} seconds")


def _refused(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(f"{grammar.param}: the grammar is not usable: {reason}", param=grammar.param)


def _definition(grammar: Grammar, special: Mapping[str, str]) -> str:
    """Return a grammar in the format of the library. special: special tokens by their text. Raises ValueError."""
    match grammar.kind:
        case "json_schema":
            schema = msgspec.json.decode(grammar.text)
            if not isinstance(schema, dict):
                raise ValueError("a JSON schema is an object")
            return str(
                LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=json_options(spaced=grammar.spaced))
            )
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "lark":
            return str(LLMatcher.grammar_from_lark(grammar.text))
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
        case "tagged":
            text = msgspec.json.decode(grammar.text, type=TaggedText)
            return str(LLMatcher.grammar_from_lark(_tagged_text(text, special)))
        case "grammar":
            return grammar_from("grammar", grammar.text)


def _tagged_text(text: TaggedText, special: Mapping[str, str]) -> str:
    """Return the Lark grammar of a text with tags. No text contains special tokens; other triggers end it at once."""

    def literal(words: str) -> str:
        parts = re.split("(" + "|".join(map(re.escape, special)) + ")", words) if special else [words]
        return " ".join(special.get(part, json.dumps(part, ensure_ascii=False)) for part in parts if part) or '""'

    lines, heads = [text.rules], dict[str, str]()
    for number, tag in enumerate(text.tags):
        if text.content or text.first or not tag.trigger:
            head = literal(tag.trigger)
        elif tag.trigger in special:
            head = f"TEXT {special[tag.trigger]}"
        else:
            head = heads.setdefault(tag.trigger, f"trigger_{len(heads)}")
        behind = literal(tag.begin.removeprefix(tag.trigger))
        lines.append(f"tag_{number}: {head} {behind} {tag.body} {literal(tag.end)}")
    lines += [f"{head}[lazy]: TEXT {json.dumps(trigger, ensure_ascii=False)}" for trigger, head in heads.items()]
    lines.append(rf"TEXT: /(\s*{text.first}(?s:.*))?/" if text.first else "TEXT: /(?s:.*)/")
    tags, end = " | ".join(f"tag_{number}" for number in range(len(text.tags))), text.content or "TEXT"
    several = f"({tags})+ | {end}" if text.content else f"({tags})* {end}"
    return "\n".join(["%llguidance {}", f"start: {f'{tags} | {end}' if text.once else several}", *lines])


def json_options(*, spaced: bool) -> JsonCompileOptions:
    """Return the options of JSON schemas: no keyword is ignored, and whitespace is bounded."""
    if spaced:
        return {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}", "lenient": False}
    return {**COMPACT_JSON, "lenient": False}  # type: ignore[typeddict-item]
