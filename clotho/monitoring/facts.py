"""The head of every display: what runs, on what, and where it answers."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from clotho.monitoring.display import RunFacts
from clotho.monitoring.terminal_text import visible
from clotho.monitoring.wording import memory, size

LINE_LIMIT = 1000


def print_facts(console: Console, facts: RunFacts) -> None:
    """Write the facts, one line each."""
    for line in fact_lines(facts):
        print_line(console, line)


def print_line(console: Console, line: str) -> None:
    """Write one line that is never broken, without markup or control characters in it."""
    console.print(Text(visible(line, LINE_LIMIT, ascii_only=console.options.ascii_only)), soft_wrap=True)


def fact_lines(facts: RunFacts) -> Iterator[str]:
    """Machine, policy, memory, address, run directory."""
    machine, policy = facts.machine, facts.policy
    yield (
        f"machine  {machine.processor}, {machine.cores} cores, {memory(machine.memory_bytes)}, {machine.system}; "
        f"MLX {machine.mlx_version} on {machine.backend} ({machine.device}); BLAS {machine.blas}"
    )
    bits = f", {policy.quantization_bits} bits" if policy.quantization_bits else ""
    yield (
        f"policy   {facts.model}: {policy.architecture}, {size(policy.parameters)} parameters, {policy.layers} layers"
        f"{bits}, {policy.dtype}; {size(policy.trainable_parameters)} trained, {memory(policy.bytes)}"
    )
    yield f"memory   {memory(facts.estimated_memory)} at most, by estimate; --dry-run shows its parts"
    yield f"API      {facts.address}/v1" if facts.address else "API      off"
    yield f"run      {facts.profile}, {facts.steps} steps, in {facts.run_dir}"
