"""What metrics of shards and clients share: histograms of seconds, counters and gauges of which there are many, size
classes of calls, and the page of a registry.

prometheus_client renders a sample in about 9 µs, of which a client of 64 shards has some 30,000; the page of these
takes a tenth of that (`python -m benchmarks.measuring`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SECONDS = (*(float(f"{10 ** (power / 11 - 1):.3g}") for power in range(-30, 27)), 60.0, 180.0, 600.0)
"""Upper bounds of all histograms of seconds: eleven in each power of ten from 0.19 ms to 23 s, so in steps of less than
1.25 and with 1, 10 and 100 ms among them; above, where calls are retried, 60, 180 and 600 s.

They are 60, since each is a sample of each series at each scrape. Steps of 1.25 from 0.2 ms to 600 s would be 68, as
log(600 s / 0.2 ms) / log(1.25) is 66.8; 60 in equal steps would be 1.29 apart."""
SIZE_CLASSES = ("none", "128", "2048", "32768", "more")
"""Classes of calls, by the largest number of rows."""
LATE_SECONDS = dict.fromkeys(SIZE_CLASSES, 0.1) | {"more": 1.0}
"""A call of a size class that takes longer is late: the objective of the alert FetchSlow."""
_CLASSES = tuple((int(name), name) for name in SIZE_CLASSES if name.isdigit())


def size_class(num_rows: int) -> str:
    """The size class of a call of `num_rows` rows; "none" without rows."""
    if not num_rows:
        return "none"
    return next((name for most, name in _CLASSES if num_rows <= most), "more")


class Registry(CollectorRegistry):
    """A registry whose samples all have `labels`, and none of which says when its series was created."""

    def __init__(self, **labels: str) -> None:
        super().__init__()
        self.labels = labels

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            if isinstance(family, _Family):
                family.constant = self.labels | family.constant
            else:
                family.samples = [
                    sample._replace(labels=self.labels | sample.labels)
                    for sample in family.samples
                    if not sample.name.endswith("_created")
                ]
            yield family


class _Series(ABC):
    """The samples of one combination of labels. Thread-safe."""

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._name, self._labels = name, labels
        self._texts: dict[str, list[str]] = {}
        """Names and labels on a page, by the labels of its registry."""

    @abstractmethod
    def _names(self, constant: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
        """The names and labels of its samples, in the order of `_values`."""

    @abstractmethod
    def _values(self) -> list[float]: ...

    def lines(self, constant: dict[str, str], braces: str) -> Iterator[str]:
        """The series on a page, with labels of its registry, also as text."""
        texts = self._texts.get(braces)
        if texts is None:
            texts = [f"{sample}{{{_in_braces(labels)}}} " for sample, labels in self._names(constant)]
            self._texts[braces] = texts
        return map(str.__add__, texts, map(repr, self._values()))

    def samples(self, constant: dict[str, str]) -> Iterator[Sample]:
        """Samples of the same lines, as prometheus_client has them."""
        return (Sample(*names, value) for names, value in zip(self._names(constant), self._values(), strict=True))


class Number(_Series):
    """One counter or gauge."""

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        super().__init__(name, labels)
        self._value, self._read = 0.0, None

    _read: Callable[[], float] | None

    def inc(self, by: float = 1) -> None:
        with self._lock:
            self._value += by

    def set_function(self, read: Callable[[], float]) -> None:
        """From now on it is what `read` returns at each scrape."""
        self._read = read

    def _names(self, constant: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
        yield self._name, constant | self._labels

    def _values(self) -> list[float]:
        return [self._value if self._read is None else self._read()]


class Durations(_Series):
    """One histogram of seconds."""

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        super().__init__(name, labels)
        self._counts, self._sum = [0] * (len(SECONDS) + 1), 0.0

    def _names(self, constant: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
        labels = constant | self._labels
        for bound in (*map(str, SECONDS), "+Inf"):
            yield f"{self._name}_bucket", labels | {"le": bound}
        yield f"{self._name}_count", labels
        yield f"{self._name}_sum", labels

    def observe(self, seconds: float) -> None:
        at = bisect_left(SECONDS, seconds)
        with self._lock:
            self._counts[at] += 1
            self._sum += float(seconds)  # of NumPy, it would be written otherwise

    def _values(self) -> list[float]:
        """The values of the buckets, which include all smaller ones, of the count and of the sum."""
        with self._lock:
            counts, total = self._counts.copy(), self._sum
        upto = list(accumulate(counts))
        return [*upto, upto[-1], total]


_One = TypeVar("_One", bound=_Series)


class _Families(Collector, Generic[_One]):
    """A family of series, by the values of their labels."""

    _kind: str
    _suffix = ""
    _one: type[_One]

    def __init__(self, name: str, text: str, labels: tuple[str, ...], registry: Registry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._series: dict[tuple[str, ...], _One] = {}
        registry.register(self)

    def labels(self, *values: str) -> _One:
        """The series of these values of the labels; it exists from now on."""
        found = self._series.get(values)
        if found is None:
            labels = dict(zip(self._labels, values, strict=True))
            found = self._series.setdefault(values, self._one(self._name + self._suffix, labels))
        return found

    def collect(self) -> Iterator[Metric]:
        yield _Family(self._name, self._text, self._kind, self._suffix, list(self._series.values()))


class Histograms(_Families[Durations]):
    """A family of histograms of seconds."""

    _kind, _one = "histogram", Durations


class Counters(_Families[Number]):
    """A family of counters, whose samples end with _total."""

    _kind, _suffix, _one = "counter", "_total", Number


class Gauges(_Families[Number]):
    """A family of gauges."""

    _kind, _one = "gauge", Number


class _Family(Metric):
    """Makes samples only for who asks for them: `page` does not."""

    def __init__(self, name: str, text: str, kind: str, suffix: str, series: Sequence[_Series]) -> None:
        self._series: Sequence[_Series] = []
        super().__init__(name, text, kind)
        self._suffix, self._series = suffix, series
        self.constant: dict[str, str] = {}
        """Labels of the registries that it was collected from."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for series in self._series for sample in series.samples(self.constant)]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """Metric begins with none."""

    def lines(self) -> Iterator[str]:
        braces = _in_braces(self.constant)
        yield f"# HELP {self.name}{self._suffix} {self.documentation}"
        yield f"# TYPE {self.name}{self._suffix} {self.type}"
        for series in self._series:
            yield from series.lines(self.constant, braces)


class _Collected:
    """Families that were collected, as a registry for prometheus_client."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def page(registry: CollectorRegistry) -> bytes:
    """All metrics of a registry in Prometheus' text format 0.0.4."""
    families = list(registry.collect())
    lines = [line for family in families if isinstance(family, _Family) for line in family.lines()]
    rest = [family for family in families if not isinstance(family, _Family)]
    return generate_latest(_Collected(rest)) + "".join(f"{line}\n" for line in lines).encode()


def _in_braces(labels: dict[str, str]) -> str:
    escaped = (
        (name, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")) for name, value in labels.items()
    )
    return ",".join(f'{name}="{value}"' for name, value in sorted(escaped))
