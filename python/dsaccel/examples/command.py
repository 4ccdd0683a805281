"""The command lines of the examples, as far as they are alike."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dsaccel.examples.report import replace_section

T = TypeVar("T")


def parse_options(
    parser: argparse.ArgumentParser,
    kind: type[T],
    numbers: Mapping[str, tuple[str, int]],
    arguments: Sequence[str] | None,
    *,
    quick: Mapping[str, Any] | None = None,
    section: str | None = None,
) -> T:
    """The options of a command line, checked; what is wrong ends the program with a message.

    Args:
        parser: with what is the example's own.
        kind: a dataclass with the defaults, with ``out`` and ``threads`` among its fields.
        numbers: what else is a whole number: its meaning and the least it may be.
        arguments: of the command line; None takes those of the program.
        quick: what ``--quick`` sets unless it is given as well; None: there is no such option.
        section: of the page that ``--doc`` gets the results into; None: there is no such option.
    """
    parser.add_argument(
        "--out", type=Path, default=argparse.SUPPRESS, help=f"folder for the results {_default(kind, 'out')}"
    )
    if quick is not None:
        parser.add_argument(
            "--quick", action="store_true", help="little work, whose figures mean nothing: to see that it runs"
        )
    for name, (text, _) in numbers.items():
        help_ = f"{text} {_default(kind, name)}"
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS, help=help_)
    parser.add_argument("--threads", type=int, default=argparse.SUPPRESS, help="CPU threads (default: torch's choice)")
    if section is not None:
        parser.add_argument("--doc", type=Path, help="also put the results into this page, between its marks")
    given = vars(parser.parse_args(arguments))
    for name, least in (*((name, least) for name, (_, least) in numbers.items()), ("threads", 1)):
        if given.get(name, least) < least:
            parser.error(f"--{name}: expected a number from {least}, got {given[name]}")
    if section is not None and given["doc"] is not None:
        try:
            replace_section(given["doc"].read_text(), section, "")
        except (OSError, ValueError) as error:
            parser.error(f"--doc: {error}")
    preset = quick if given.pop("quick", False) and quick is not None else {}
    return kind(**{**preset, **given})


def _default(kind: type, name: str) -> str:
    return f"(default: {getattr(kind, name)})"
