"""The gauges by which routers choose a server, under vLLM's names.

Source: the Gateway API inference extension's model server protocol (its proposal 003).
"""

import time

from gateway import metrics
from gateway.gateway import Gateway


def update(gateway: Gateway) -> None:
    """Sets the gauges to what the thinker's replicas told last; nothing where there is no thinker."""
    stage = gateway.pipeline.output("text")
    name = None if stage is None else gateway.model_of(stage)
    if stage is None or name is None:
        return
    serving = [replica for replica in stage.replicas.values() if replica.serving]
    metrics.VLLM_RUNNING.labels(name).set(sum(replica.running for replica in serving))
    metrics.VLLM_WAITING.labels(name).set(sum(replica.queued for replica in serving))
    used = sum(replica.kv_cache_usage for replica in serving)
    metrics.VLLM_KV_CACHE.labels(name).set(used / len(serving) if serving else 0.0)
    metrics.VLLM_LORAS.clear()  # a set of adapters is a series of its own: those of before are no more
    info = stage.info
    if info is not None and info.thinker.max_loras:
        loaded = ",".join(stage.loras)
        metrics.VLLM_LORAS.labels(info.thinker.max_loras, loaded, "").set(time.time())
