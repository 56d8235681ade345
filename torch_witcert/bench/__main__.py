"""Command line: `python -m torch_witcert.bench attention|scaling`. Needs a CUDA GPU."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path

from ..evaluation.output import quiet_libraries
from . import attention, scaling
from .report import Row
from .session import Refused, Session, add_arguments

COMMANDS = {
    "attention": (attention, "one decode step against bf16 kernels, behind a correctness gate"),
    "scaling": (scaling, "certified attention over five lengths and five batch sizes"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_witcert.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        add_arguments(command)
    return parser


def exit_status(rows: list[Row]) -> int:
    """1 where a gate was red, else 0; names every red configuration."""
    red = [row for row in rows if row.gate == "red"]
    for row in red:
        print(f"RED GATE, not timed: {row.store_format} on {row.shape}: {row.note}", flush=True)
    return 1 if red else 0


def main(arguments: list[str] | None = None, make_session: Callable[[argparse.Namespace], Session] = Session.of) -> int:
    """Run a command.

    Args:
        arguments: of the command line.
        make_session: how to measure, from the parsed options; tests bring their own operators and timer.

    Returns:
        The exit status: 0, or 1 where a gate was red. What cannot run exits with 2.
    """
    quiet_libraries()
    parser = build_parser()
    options = parser.parse_args(arguments)
    for name in ("csv", "plot"):
        path = getattr(options, name, None)
        if path and Path(path).exists():
            parser.error(f"--{name} must name a new file, {path} exists")
    if getattr(options, "plot", None) and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    try:
        rows = COMMANDS[options.command][0].run(options, make_session(options))
    except Refused as error:
        parser.error(str(error))
    return exit_status(rows)


if __name__ == "__main__":
    raise SystemExit(main())
