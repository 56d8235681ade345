"""Command line: `python -m torch_witcert env`."""

from __future__ import annotations

import argparse

from .env import environment_report


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torch_witcert",
        description="Measurements on a real model: python -m torch_witcert.evaluation --help",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions, GPU, and what is supported here")
    parser.parse_args(arguments)
    print(environment_report())


if __name__ == "__main__":
    main()
