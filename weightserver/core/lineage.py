"""Marks, which name states of a shard, and the lineage of a directory: the states that it descends from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_ANCESTORS = 4_096
"""Number of incarnations in a lineage; older ones are forgotten."""
_MAX_COMMIT_DIGITS = 20


def split_mark(mark: str) -> tuple[str, int]:
    """(incarnation, commit).

    Raises:
        ValueError: it is not a mark.
    """
    incarnation, _, commit = mark.partition(":")
    if len(incarnation) != 16 or not commit.isascii() or not commit.isdigit() or len(commit) > _MAX_COMMIT_DIGITS:
        raise ValueError(f"{mark[:60]!r} is not a mark of a shard: give incarnation:commit, as the shard answers it")
    return incarnation, int(commit)


def is_earlier(mark: str, other: str) -> bool:
    """Whether `mark` is an earlier state of the same incarnation as `other`; an empty mark is not ordered."""
    if not (mark and other):
        return False
    (incarnation, commit), (other_incarnation, other_commit) = split_mark(mark), split_mark(other)
    return incarnation == other_incarnation and commit < other_commit


@dataclass(frozen=True)
class Lineage:
    """The states that a directory descends from: those of each incarnation, a process that wrote, up to a commit.

    A mark, `incarnation:commit`, names one of these states. A client that was shown a mark can distinguish a directory
    that holds everything since from an older copy, or another directory: only the former descends from the mark.
    """

    ancestors: tuple[tuple[str, int], ...] = ()
    """(incarnation, its last commit), oldest first."""

    def joined(self, marks: Iterable[str]) -> Lineage:
        """The lineage that descends from these states too."""
        ancestors = dict(self.ancestors)
        for incarnation, commit in map(split_mark, marks):
            ancestors[incarnation] = max(commit, ancestors.pop(incarnation, 0))
        return Lineage(tuple(ancestors.items())[-MAX_ANCESTORS:])

    @classmethod
    def of_all(cls, lineages: Iterable[Sequence[str]]) -> Lineage:
        """The lineage that descends from several ones, each given by its marks, oldest first: the last marks of each
        are the last to be forgotten."""
        by_age = itertools.zip_longest(*map(reversed, lineages))
        return cls().joined([mark for marks in by_age for mark in marks if mark][::-1])

    def up_to(self, mark: str) -> Lineage:
        """The lineage of the state named by a mark, which is this state or an earlier one."""
        names = [name for name, _ in self.ancestors]
        incarnation, _ = split_mark(mark)
        before = self.ancestors[: names.index(incarnation)] if incarnation in names else self.ancestors
        return Lineage(before).joined([mark])

    @property
    def marks(self) -> list[str]:
        return [f"{incarnation}:{commit}" for incarnation, commit in self.ancestors]

    def holds(self, mark: str) -> bool:
        incarnation, commit = split_mark(mark)
        return any(known == incarnation and commit <= last for known, last in reversed(self.ancestors))
