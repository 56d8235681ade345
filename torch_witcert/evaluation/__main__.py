"""Command line: `python -m torch_witcert.evaluation coverage|fidelity|outliers|soundness`."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import coverage, fidelity, outliers, soundness
from .output import quiet_libraries
from .prompts import add_device_argument, add_model_arguments, chosen_dtype

#: Commands that measure on SmolLM2, and those that need no model.
MODEL_COMMANDS = {
    "coverage": (coverage, "coverage and tightness of the certificate on real keys and queries, by layout of the keys"),
    "fidelity": (fidelity, "certified model against the dense one, one token at a time, teacher forced"),
}
OPERATOR_COMMANDS = {
    "outliers": (outliers, "what massive RoPE pairs do to the certificate, and what keeping them exact costs"),
    "soundness": (soundness, "the operators on many random and adversarial caches against float64"),
}
COMMANDS = MODEL_COMMANDS | OPERATOR_COMMANDS


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_witcert.evaluation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        if name in MODEL_COMMANDS:
            command.add_argument(
                "--text", metavar="PATH", help="text to measure on (default: licence texts found here)"
            )
            add_model_arguments(command)
        else:
            add_device_argument(command)
        command.add_argument("--json", metavar="PATH", help="also write the result there; must not exist")
    return parser


def main(arguments: list[str] | None = None) -> None:
    quiet_libraries()
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.json and Path(options.json).exists():
        parser.error(f"--json must name a new file, {options.json} exists")
    if options.command in MODEL_COMMANDS:
        options.dtype = chosen_dtype(options)
    COMMANDS[options.command][0].run(options)


if __name__ == "__main__":
    main()
