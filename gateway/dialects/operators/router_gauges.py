"""Gauges by which routers choose a server, under vLLM's names.

Source: the Gateway API inference extension's model server protocol (its proposal 003)."""

import time

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gateway.answers.gateway import Gateway

# A registry of its own: a vLLM engine in this process removes its names from the common one.
_REGISTRY = CollectorRegistry()


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(name, text, labels, registry=_REGISTRY)


_RUNNING = _gauge("vllm:num_requests_running", "Requests that the thinker's replicas work on", "model_name")
_WAITING = _gauge("vllm:num_requests_waiting", "Requests that wait in the thinker's replicas", "model_name")
_KV_CACHE = _gauge(
    "vllm:kv_cache_usage_perc", "Part of the thinker's KV cache in use, 0 to 1: mean of its replicas", "model_name"
)
_LORAS = _gauge(
    "vllm:lora_requests_info",
    "Unix seconds; the labels have the adapters that are loaded, none of which waits",
    *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
_CACHE = _gauge(
    "vllm:cache_config_info",
    "1; the labels have the tokens of a block of the thinker's KV cache, and the blocks of all its replicas",
    *("block_size", "num_gpu_blocks"),
)


def exposition(gateway: Gateway) -> bytes:
    """The gauges in Prometheus' format; without values where there is no thinker."""
    stage = gateway.pipeline.output("text")
    name = None if stage is None else gateway.catalog.model_of(stage)
    if stage is not None and name is not None:
        serving = [replica for replica in stage.replicas.values() if replica.serving]
        _RUNNING.labels(name).set(sum(replica.running for replica in serving))
        _WAITING.labels(name).set(sum(replica.queued for replica in serving))
        used = sum(replica.kv_cache_usage for replica in serving)
        _KV_CACHE.labels(name).set(used / len(serving) if serving else 0.0)
        _LORAS.clear()  # each set of adapters is a series: drop the old ones
        if stage.info is not None and stage.info.thinker.max_loras:
            _LORAS.labels(stage.info.thinker.max_loras, ",".join(stage.loras), "").set(time.time())
        _CACHE.clear()  # likewise, as replicas come and go
        infos = [replica.info.thinker for replica in serving if replica.info is not None]
        if infos and infos[0].kv_block_tokens:
            _CACHE.labels(infos[0].kv_block_tokens, sum(info.kv_blocks for info in infos)).set(1)
    return generate_latest(_REGISTRY)
