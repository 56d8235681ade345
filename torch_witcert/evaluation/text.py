"""Licence texts as long, public, English test text that is already on the machine."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

#: Where Debian keeps licence texts; the figures in README were measured on these two, joined in this order.
COMMON_LICENCES = (Path("/usr/share/common-licenses/GPL-3"), Path("/usr/share/common-licenses/Apache-2.0"))
#: Distributions whose licence files are long (each carries the GPL-3, or many licences) and that usually are installed.
LICENSED_DISTRIBUTIONS = ("numpy", "torch", "matplotlib", "pillow", "torch-witcert")


def _installed_licences() -> list[Path]:
    """Licence files of the installed distributions, in a fixed order."""
    found = []
    for name in LICENSED_DISTRIBUTIONS:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        paths = (Path(file.locate()) for file in files if file.name.upper().startswith(("LICENSE", "NOTICE")))
        found += sorted(path for path in paths if path.is_file())
    return found


def licence_text(path: str | Path | None = None) -> tuple[str, str]:
    """Text to measure on, and the name of its source.

    Args:
        path: a UTF-8 text file; None takes Debian's GPL-3 and Apache-2.0 where they exist, else the licence files that
            installed packages carry, duplicates left out.

    Returns:
        (text, source).

    Raises:
        FileNotFoundError: `path` does not exist, or no licence text was found.
    """
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"--text must name a text file, got {path}")
        return Path(path).read_text(encoding="utf-8"), str(path)
    if all(licence.is_file() for licence in COMMON_LICENCES):
        return "".join(licence.read_text(encoding="utf-8") for licence in COMMON_LICENCES), "GPL-3 and Apache-2.0"
    texts = dict.fromkeys(file.read_text(encoding="utf-8", errors="replace") for file in _installed_licences())
    if not texts:
        raise FileNotFoundError(
            "no licence text was found on this machine: pass --text PATH, a text of 4,096 tokens or more"
        )
    return "\n".join(texts), "licence files of installed packages"


def take_tokens(tokenizer, text: str, count: int, source: str):
    """The first `count` tokens of `text`, int64 [1, count].

    Raises:
        ValueError: the text is shorter.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids
    if ids.shape[1] < count:
        raise ValueError(
            f"the text ({source}) has {ids.shape[1]} tokens, {count} are needed: pass --text PATH, a longer text"
        )
    return ids[:, :count]
