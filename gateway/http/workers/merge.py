"""Merges the answers of all workers to one request."""

from collections.abc import Iterator, Sequence

import httpx
import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response

# Metrics of the stages: each process reports the same values, so the first is enough.
_OF_THE_STAGES = ("vllm:", "quartet_gateway_replicas", "quartet_gateway_replica_load")

Answers = Sequence[tuple[int, httpx.Response]]


class _MergedCollector(Collector):
    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def metrics(answers: Answers) -> Response:
    """All workers' samples, with the worker's number as the label `worker`."""
    families: dict[str, Metric] = {}
    for number, answer in answers:
        for family in text_string_to_metric_families(answer.text):
            is_shared = family.name.startswith(_OF_THE_STAGES)
            known = families.get(family.name)
            if known is None:
                known = families[family.name] = Metric(family.name, family.documentation, family.type)
            elif is_shared:
                continue
            for sample in family.samples:
                own = {} if is_shared else {"worker": str(number)}
                known.add_sample(sample.name, {**sample.labels, **own}, sample.value, sample.timestamp, sample.exemplar)
    registry = CollectorRegistry()
    registry.register(_MergedCollector(families))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def trace(answers: Answers) -> Response:
    """The answer with the most spans, by the worker that served the request."""
    most = max((answer for _, answer in answers), key=_spans)
    return Response(most.content, most.status_code, dict(most.headers))


def _spans(answer: httpx.Response) -> int:
    return len(orjson.loads(answer.content)["spans"]) if answer.status_code == 200 else -1
