"""What memory a run would take, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clotho.monitoring.wording import memory
from protocols.memory import MemoryEstimate, MemoryPart


def print_estimate(console: Console, estimate: MemoryEstimate, parts: Sequence[MemoryPart], machine_bytes: int) -> None:
    """Write the parts, largest first, and what they come to; machine_bytes: of memory that there is."""
    table = Table(title=Text("memory, estimated"), title_justify="left", safe_box=True)
    table.add_column(Text("part"))
    table.add_column(Text("at most"), justify="right")
    table.add_column(Text("smaller with"), overflow="fold")
    for part in sorted(parts, key=lambda part: -part.bytes):
        table.add_row(Text(part.component), Text(memory(part.bytes)), Text(part.change, style="dim"))
    console.print(table)
    console.print(Text(f"total        {memory(estimate.total)} of {memory(machine_bytes)}"), soft_wrap=True)
    turns = "the backward pass, the optimizer's step and decoding take turns, so the parts may add up to more"
    console.print(Text(turns), style="dim", soft_wrap=True)
    if estimate.shipped_shape:
        shape = (
            "the model is not on this machine: its shape is taken from the configuration that ships with the project"
        )
        console.print(Text(shape), style="dim", soft_wrap=True)
