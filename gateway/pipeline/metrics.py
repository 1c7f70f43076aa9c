"""Prometheus metrics of routing."""

from prometheus_client import Counter, Gauge

REPLICAS = Gauge(
    "quartet_gateway_replicas", "Replicas known, by state: serving, refused or down", ["stage", "replica_state"]
)
CHOSEN = Counter("quartet_gateway_replica_requests_total", "Requests sent to a replica", ["stage", "replica"])
LOAD = Gauge(
    "quartet_gateway_replica_load", "Requests a replica runs and queues, as this gateway knows", ["stage", "replica"]
)
AFFINITY = Counter(
    "quartet_gateway_affinity_total",
    "Choices by prefix: preferred, or diverted because the preferred replica was much more loaded",
    ["stage", "outcome"],
)
RETRIES = Counter(
    "quartet_gateway_retries_total", "Requests tried again on other replicas, by the stage that was lost", ["stage"]
)


def forget(stage: str, replica: str) -> None:
    """Drops the series of a replica that is gone: addresses would add up for ever."""
    for metric in (CHOSEN, LOAD):
        try:
            metric.remove(stage, replica)
        except KeyError:  # it never had a request
            continue
