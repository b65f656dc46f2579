"""The command line: what is asked for, and what is wrong with it, before anything that takes time is imported.

All that a run needs takes more than a second to import; flags, profiles and run directories a tenth of one. So the two
commands that need more import it themselves, once there is nothing left to complain of.
"""

from __future__ import annotations

import gc
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import anyio
from rich.console import Console

from clotho.config.flags import Arguments, help_text, parse_arguments
from clotho.config.load import load_profile, resolved_toml
from clotho.config.schema import Profile
from protocols.errors import ClothoError


def main(argv: Sequence[str] | None = None) -> int:
    """The program: 0 for a run that ended well, 1 for one that failed, 2 for what its user can mend."""
    console = Console()
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        if arguments.help:
            console.print(help_text(), markup=False, highlight=False, soft_wrap=True)
            return 0
        profile = load_profile(arguments.profile, arguments.overrides)
        return dry_run(profile, console) if arguments.dry_run else run(profile, arguments, console)
    except ClothoError as error:
        return complain(error)
    except KeyboardInterrupt:  # before the run listened to signals, or after it was stopped
        return 128 + signal.SIGINT


def run(profile: Profile, arguments: Arguments, console: Console) -> int:
    """Train in the profile's run directory; the exit status."""
    from clotho.storage.run_directory import open_run

    directory = open_run(Path(profile.run_dir), resume=arguments.resume, clean=arguments.clean)
    try:
        gc.disable()  # nothing of what is loaded is garbage, then or later, and looking for it takes time
        try:
            from pipeline import train
        finally:
            gc.freeze()
            gc.enable()
        return anyio.run(train, profile, directory, console)
    finally:
        directory.close()


def dry_run(profile: Profile, console: Console) -> int:
    """Show the resolved profile, and what memory its run would take; touch nothing."""
    console.print(resolved_toml(profile, mask_secrets=True), markup=False, highlight=False, soft_wrap=True)
    from clotho.memory.estimate import estimate_memory
    from clotho.memory.report import describe
    from clotho.models.machine import physical_memory
    from clotho.monitoring.summary import print_estimate

    estimate = estimate_memory(profile.model, profile)
    print_estimate(console, estimate, describe(estimate), physical_memory())
    return 0


def complain(error: ClothoError) -> int:
    """One line on stderr for what went wrong, and the traceback where the fault is ours; the exit status."""
    cause = error.__cause__
    if error.exit_status != 2 and cause is not None and not isinstance(cause, ClothoError):
        traceback.print_exception(cause)
    sys.stderr.write(f"clotho: {error}\n")
    for note in getattr(error, "__notes__", ()):
        sys.stderr.write(f"  {note}\n")
    return error.exit_status
