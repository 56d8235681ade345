"""Types of command-line arguments: what a command cannot use is refused before anything is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch


def whole_number(least: int) -> Callable[[str], int]:
    """Whole numbers from `least` on; 1e7 is one."""

    def parse(text: str) -> int:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if number != int(number) or number < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return int(number)

    return parse


def fraction(text: str) -> float:
    """A limit on the total variation, in (0, 1]."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and at most 1, got {text!r}")
    return number


def device(text: str) -> str:
    """A device that this torch can use."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return text
