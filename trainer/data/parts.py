"""Work that several processes share: each does a part of equal length."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Part:
    """One of several parts."""

    number: int
    """From 0 to of − 1."""
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
