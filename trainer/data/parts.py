"""Work that several processes share: each does a part of equal length."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Part:
    """One of several parts."""

    number: int
    """The part's number, from 0 to of − 1."""
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def range(self, count: int) -> range:
        """This part of 0 … count−1; the parts of a whole cover it, each number once."""
        return range(count * self.number // self.of, count * (self.number + 1) // self.of)


WHOLE = Part(0, 1)


def to_part(text: str) -> Part:
    """Parses a part of the command line, as 2/4.

    Raises:
        ArgumentTypeError: there is no such part.
    """
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise ArgumentTypeError(f"there is no part {text}: give I/N, with I from 0 to N − 1")
    return Part(int(number), int(of))


def add_part_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments --part, --engine and --address; one of the first two may be given."""
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--part", type=to_part, metavar="I/N", help="do one of N parts, from 0/N to N−1/N")
    ways.add_argument("--engine", choices=["ray"], help="do all parts on a Ray cluster (extra ray)")
    parser.add_argument("--address", help="the cluster: HOST:PORT or auto (default: RAY_ADDRESS, or this machine)")


def check_part_arguments(options: Namespace) -> None:
    """Raises ValueError for an --address without a cluster to reach there."""
    if options.address and not options.engine:
        raise ValueError("--address is that of a Ray cluster: give --engine ray, or omit it")
