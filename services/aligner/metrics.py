"""Prometheus metrics that only the aligner has."""

from prometheus_client import Counter

from services.common.telemetry import metrics

AUDIO_SECONDS = Counter("quartet_aligner_audio_seconds_total", "Seconds of sound whose words were given times")
WORDS = Counter("quartet_aligner_words_total", "Words that were given times")
STEP_SECONDS = metrics.STEP_SECONDS.labels("aligner", "step")
STEP_BATCH = metrics.STEP_BATCH.labels("aligner", "step")
