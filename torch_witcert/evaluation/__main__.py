"""Command line: `python -m torch_witcert.evaluation coverage|fidelity`."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import coverage, fidelity
from .output import quiet_libraries
from .prompts import add_model_arguments, chosen_dtype

COMMANDS = {
    "coverage": (coverage, "coverage and tightness of the certificate on real keys and queries, by page size"),
    "fidelity": (fidelity, "certified model against the dense one, one token at a time, teacher forced"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_witcert.evaluation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.add_argument(
            "--text", metavar="PATH", help="text to measure on (default: licence texts of this machine)"
        )
        add_model_arguments(command)
        command.add_argument("--json", metavar="PATH", help="also write the result there; must not exist")
    return parser


def main(arguments: list[str] | None = None) -> None:
    quiet_libraries()
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.json and Path(options.json).exists():
        parser.error(f"--json must name a new file, {options.json} exists")
    options.dtype = chosen_dtype(options)
    COMMANDS[options.command][0].run(options)


if __name__ == "__main__":
    main()
