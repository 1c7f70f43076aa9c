"""Prometheus metrics of a process: one moment, and the difference of two."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """`at` is time.monotonic() seconds."""

    at: float = field(default_factory=time.monotonic)
    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, page: str) -> "Scrape":
        """Reads Quartet's samples. Raises ValueError."""
        samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.startswith("quartet_"):
                    samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        return cls(samples=samples)

    def total(self, name: str, **labels: str) -> float | None:
        """Sums the series that have `labels`; None: there is none."""
        wanted = labels.items()
        values = [value for has, value in self.samples.get(name, {}).items() if wanted <= has]
        return sum(values) if values else None

    def values_of(self, name: str, label: str) -> set[str]:
        return {value for has in self.samples.get(name, {}) for key, value in has if key == label}


@dataclass(frozen=True)
class MetricsDelta:
    """The difference of two scrapes; since the start if the process was restarted or idle."""

    first: Scrape
    last: Scrape

    def rate(self, name: str, **labels: str) -> float | None:
        """Increase of a counter a second; None if unknown."""
        now, before = self.last.total(name, **labels), self.first.total(name, **labels) or 0.0
        seconds = self.last.at - self.first.at
        if now is None or seconds <= 0:
            return None
        return (now - before if now >= before else now) / seconds

    def mean(self, name: str, **labels: str) -> float | None:
        """Mean of a histogram; None if it has no observations."""
        first = self._base(name, **labels)
        count = self._since(first, f"{name}_count", **labels)
        return self._since(first, f"{name}_sum", **labels) / count if count else None

    def quantile(self, q: float, name: str, **labels: str) -> float | None:
        """Quantile `q` (0 to 1) of a histogram, interpolated in its bucket; None as `mean`."""
        first, bucket = self._base(name, **labels), f"{name}_bucket"
        bounds = sorted(self.last.values_of(bucket, "le"), key=float)
        counts = [(float(le), self._since(first, bucket, le=le, **labels)) for le in bounds]
        if not counts or not counts[-1][1]:
            return None
        rank, low, below = q * counts[-1][1], 0.0, 0.0
        for high, count in counts:
            if count >= rank and count > below:
                return low if high == float("inf") else low + (high - low) * (rank - below) / (count - below)
            low, below = high, count
        return low

    def busiest(self, name: str, label: str) -> str | None:
        """Value of `label` whose series has most observations."""
        values = sorted(self.last.values_of(f"{name}_count", label))
        return max(values, key=lambda value: self.last.total(f"{name}_count", **{label: value}) or 0.0, default=None)

    def _base(self, name: str, **labels: str) -> Scrape:
        """The scrape to count from."""
        now, before = (scrape.total(f"{name}_count", **labels) or 0.0 for scrape in (self.last, self.first))
        return self.first if now > before else Scrape()

    def _since(self, first: Scrape, name: str, **labels: str) -> float:
        return (self.last.total(name, **labels) or 0.0) - (first.total(name, **labels) or 0.0)
