"""Prometheus metrics of the gateway."""

from prometheus_client import Counter, Gauge, Histogram

_LATENCY_BUCKETS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

HTTP_REQUESTS = Counter("quartet_gateway_requests_total", "HTTP requests ended", ["path", "status"])
IGNORED = Counter(
    "quartet_gateway_ignored_members_total", "Members of requests that have no effect, by name", ["path", "member"]
)
RUNNING = Gauge("quartet_gateway_running_requests", "Requests for answers, images, sound or videos in progress")
TTFT = Histogram(
    "quartet_gateway_ttft_seconds", "From a request's arrival to its first text", buckets=_LATENCY_BUCKETS_S
)
TTFA = Histogram(
    "quartet_gateway_ttfa_seconds", "From a request's arrival to its first audio", buckets=_LATENCY_BUCKETS_S
)
RTF = Histogram(
    "quartet_gateway_real_time_factor",
    "Seconds a spoken answer took per second of its audio",
    buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0),
)
PROMPT_TOKENS = Counter("quartet_gateway_prompt_tokens_total", "Tokens of prompts")
TEXT_TOKENS = Counter("quartet_gateway_text_tokens_total", "Text tokens of answers")
AUDIO_SECONDS = Counter("quartet_gateway_audio_seconds_total", "Audio of answers, in seconds")
EMBEDDED = Counter("quartet_gateway_embedded_inputs_total", "Texts embedded, and pairs of texts scored")
IMAGES = Counter("quartet_gateway_images_total", "Images made")
VIDEOS = Counter("quartet_gateway_videos_total", "Video jobs ended, but for deleted ones", ["status"])
KEY_REQUESTS = Counter("quartet_gateway_key_requests_total", "Requests admitted, by the name of their API key", ["key"])
KEY_REFUSED = Counter(
    "quartet_gateway_key_refused_total",
    "Requests refused for a limit of their API key, by its name and the limit: concurrency or rate",
    ["key", "limit"],
)
KEY_RUNNING = Gauge(
    "quartet_gateway_key_running_requests",
    "Requests in progress and videos not ended, by the name of their API key",
    ["key"],
)


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


REALTIME_SESSIONS = Gauge("quartet_gateway_realtime_sessions", "Realtime sessions that are open")
USERS_SPEAKING = Gauge(
    "quartet_gateway_users_speaking", "Realtime sessions whose user speaks, by transport", ["transport"]
)
FIRST_SOUND = Histogram(
    "quartet_gateway_first_sound_seconds",
    "From a user's last word to the first sound sent of the answer, the silence that ends the turn included",
    ["transport"],
    buckets=(0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 30.0),
)
UNDERRUNS = Counter(
    "quartet_gateway_underruns_total", "Pieces of realtime sound sent too late for gapless playback", ["transport"]
)
UNDERRUN_S = Counter(
    "quartet_gateway_underrun_seconds_total", "Silence before pieces that were sent too late", ["transport"]
)
BARGE_INS = Counter("quartet_gateway_barge_ins_total", "Answers that ended because the user began to speak")
SPECULATIONS = Counter(
    "quartet_gateway_speculations_total",
    "Answers begun in a pause of the user, by outcome: used, or wasted as the user went on",
    ["outcome"],
)
SPECULATION_SAVED = Histogram(
    "quartet_gateway_speculation_saved_seconds",
    "How much sooner the first audio of an answer came for having begun in a pause",
    buckets=_LATENCY_BUCKETS_S,
)


def spoken(audio_s: float, elapsed_s: float) -> None:
    AUDIO_SECONDS.inc(audio_s)
    if audio_s:
        RTF.observe(elapsed_s / audio_s)


def forget_replica(stage: str, replica: str) -> None:
    """Drops a replica's series: addresses would add up."""
    for metric in (CHOSEN, LOAD):
        metric.remove_by_labels({"stage": stage, "replica": replica})


def forget_key(key: str) -> None:
    for metric in (KEY_RUNNING, KEY_REQUESTS, KEY_REFUSED):
        metric.remove_by_labels({"key": key})
