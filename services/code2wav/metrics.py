"""Prometheus metrics that only code2wav has, and its own of `services.common.telemetry.metrics`."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry import metrics

LEAD = Histogram(
    "quartet_code2wav_lead_seconds",
    "Audio sent but not yet played when the next chunk leaves, for a player that began with the first; "
    "below 0: how long it was silent",
    buckets=(-1.0, -0.5, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
UNDERRUNS = Counter("quartet_code2wav_underruns_total", "Chunks that left after playback had run dry")
UNDERRUN_SECONDS = Counter("quartet_code2wav_underrun_seconds_total", "Silence before those chunks")
FRAMES_QUEUED = Gauge("quartet_code2wav_frames_queued", "Codec frames taken in and not yet decoded, of all streams")
STREAMS_RUNNING = Gauge("quartet_code2wav_streams_running", "Streams that have a slot")
STREAMS_WAITING = Gauge("quartet_code2wav_streams_waiting", "Streams that wait for a slot")
FRAMES_DECODED = Counter("quartet_code2wav_frames_decoded_total", "Codec frames whose samples were given out")
FRAMES_COMPUTED = Counter(
    "quartet_code2wav_frames_computed_total",
    "Codec frames that went through the decoder, those of cancelled streams and of padding included",
)
STEP_FRAMES = Histogram(
    "quartet_code2wav_step_frames", "Codec frames of each stream in a step", buckets=(1, 2, 4, 8, 16, 32, 64)
)
STEP_SECONDS = metrics.STEP_SECONDS.labels("code2wav", "decode")
STEP_BATCH = metrics.STEP_BATCH.labels("code2wav", "decode")
