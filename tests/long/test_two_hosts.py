"""A system over two hosts: it answers as on one, survives the loss of the link, and plays over a long and slow one."""

import base64
import contextlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec

import httpx
import numpy as np
import pytest

from benchmarks.traffic.player import AUDIBLE_GAP_MS, longest_gap_ms
from tests.support.clients.speech import events, speech
from tests.support.network.hosts import missing, two_hosts
from tests.support.samples import media
from tests.support.systems.stack import HANG_GUARD_S, until
from tests.support.systems.two_hosts import TwoHostsStack, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]
UCX = (
    pytest.mark.skipif(not find_spec("ucxx"), reason="needs ucxx: pip install 'quartet[ucx]'"),
    pytest.mark.weekly,
)

CLIENTS = 4
# The keepalive of services/common/rpc/channels.py takes 5 to 10 seconds, TCP without it a quarter of an hour.
NOTICED_S = 60
ONE_WAY_S, RATE_BPS = 0.05, 20e6
DESCRIPTORS_MORE = 2  # at most: connections that are made anew while others of before time out
# What requests hold, by metric.
HELD = ("quartet_stream_credits_outstanding", "quartet_stream_positions_pending", "quartet_kv_cache_used_ratio")
BYTES_A_MS = 24_000 * 2 / 1000  # the checkpoint's rate, 16 bits a sample
TOLERANCE = 4  # of a PCM16 sample: 1e-4 of full scale, as everywhere, and its rounding

# An idle stream to argv[1]: says when it has it, and after a line of input how long it took to be told of its loss.
IDLE = """
import asyncio, sys, time
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services.common.rpc.channels import Channels

async def main():
    watch = health_pb2_grpc.HealthStub(Channels().channel(sys.argv[1])).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    print("watching", flush=True)
    sys.stdin.readline()
    cut = time.monotonic()
    try:
        await watch.read()
    except grpc.aio.AioRpcError as error:
        print(error.code().name, time.monotonic() - cut)

asyncio.run(main())
"""


@dataclass
class Heard:
    """What a client heard.

    Attributes:
        pieces: of the audio: when each came (time.monotonic() seconds), and its PCM16.
        error: what ended it early, and `error_at` when.
    """

    text: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: dict | None = None
    error_at: float = 0.0

    @property
    def samples(self) -> np.ndarray:
        """All of the audio, 24 kHz mono: (samples) int16."""
        return np.frombuffer(b"".join(pcm16 for _, pcm16 in self.pieces), np.int16)


def listen(url: str, body: dict, on_audio=lambda: None, key: str = "none") -> Heard:
    """A streamed request, to its end. `on_audio` is called at its first piece of audio."""
    heard = Heard()
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60, headers=headers) as response:
        for event in events(response):
            if "error" in event:
                heard.error, heard.error_at = event["error"], time.monotonic()
            for choice in event.get("choices", ()):
                heard.text += choice["delta"].get("content") or ""
                if data := (choice["delta"].get("audio") or {}).get("data"):
                    heard.pieces.append((time.monotonic(), base64.b64decode(data)))
                    if len(heard.pieces) == 1:
                        on_audio()
    return heard


def picture_in_speech(model: str) -> dict:
    """A request whose hidden states go from host to host: those of a picture's positions."""
    picture = f"data:image/png;base64,{base64.b64encode(media.png(112, 84)).decode()}"
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": picture}}]
    messages = [{"role": "user", "content": content}]
    talker = {"temperature": 1, "seed": 3, "max_frames": 60}
    return speech(model, messages=messages, max_tokens=40, quartet={"talker": talker})


def assert_same(heard: Heard, reference: Heard) -> None:
    """Equal tokens and codes make equal text and as many samples; those differ by rounding, by how the frames came to
    be decoded together."""
    assert heard.error is None
    assert heard.text == reference.text
    assert len(heard.samples) == len(reference.samples) > 0
    assert np.abs(heard.samples.astype(int) - reference.samples).max() <= TOLERANCE


def model_of(url: str) -> str:
    return httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]


@contextlib.contextmanager
def idle_stream(system: TwoHostsStack) -> Iterator[subprocess.Popen]:
    """A process on host b with a stream from the thinker, on which nothing comes; see IDLE."""
    command = system.hosts.b.command(sys.executable, "-c", IDLE, system.address("thinker"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "watching\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="grpc"),
        pytest.param(("--transports=inline,ucx", "--large-tensor-bytes=1"), id="ucx", marks=UCX),
    ],
)
def system(request, tiny_checkpoint, tmp_path_factory) -> Iterator[TwoHostsStack]:
    """The system over two hosts; parameters: flags that every stage gets."""
    if reason := missing():
        pytest.skip(reason)
    with two_hosts() as hosts, running(hosts, tiny_checkpoint, tmp_path_factory.mktemp("hosts"), request.param) as up:
        yield up


@pytest.fixture(scope="module")
def reference(stack) -> Heard:
    """The same answer from one host."""
    heard = listen(stack.url, picture_in_speech(stack.model), key=stack.key)
    assert heard.error is None
    return heard


def test_two_hosts_answer_as_one_does(system, reference, request):
    assert_same(listen(system.url, picture_in_speech(model_of(system.url))), reference)
    transport = "ucx" if "ucx" in request.node.name else "inline"
    for stage in ("thinker", "talker"):
        assert system.totals("quartet_stream_bytes_total", transport=transport)[stage] > 0


@pytest.mark.parametrize("cut", ["pulled", "silent"])
def test_a_cut_link_is_a_typed_error_in_time_and_leaves_nothing_behind(system, reference, cut):
    url, hosts = system.url, system.hosts
    until(system.ready, "ready before the test")
    assert_same(listen(url, picture_in_speech(model_of(url))), reference)  # now every connection is there
    descriptors = system.descriptors()
    speaking = threading.Barrier(CLIENTS + 1, timeout=HANG_GUARD_S)
    long = speech(model_of(url))
    with idle_stream(system) as idle, ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(listen, url, long, speaking.wait) for _ in range(CLIENTS)]
        speaking.wait()
        with getattr(hosts, cut)():
            at = time.monotonic()
            assert idle.stdin
            idle.stdin.write("\n")
            idle.stdin.flush()
            for heard in (future.result() for future in asked):
                assert heard.error
                assert heard.error["type"] == "service_unavailable_error", heard.error
                assert heard.error["code"] == "stage_unavailable", heard.error
                assert heard.error_at - at < NOTICED_S
            until(lambda: not any(system.totals("quartet_requests_in_flight").values()), "free while it is cut")
            refused = httpx.post(f"{url}/v1/chat/completions", json=long, timeout=NOTICED_S)
            assert refused.status_code == 503
            for held in HELD:
                until(lambda held=held: not any(system.totals(held).values()), held)
            code, noticed_s = idle.communicate(timeout=NOTICED_S)[0].split()
            assert code == "UNAVAILABLE"
            assert float(noticed_s) < NOTICED_S
    until(system.ready, "ready again")
    assert_same(listen(url, picture_in_speech(model_of(url))), reference)
    until(lambda: system.more_descriptors(descriptors) <= DESCRIPTORS_MORE, "no more files and sockets than before")


def test_a_long_and_slow_link_plays_without_a_gap(system, reference):
    until(system.ready, "ready before the test")
    gaps_ms = []
    with system.hosts.far(ONE_WAY_S, RATE_BPS):
        assert system.round_trip_s() >= 2 * ONE_WAY_S
        system.start_gateway()  # connects over it
        while len(gaps_ms) < 40 and min(gaps_ms, default=math.inf) > AUDIBLE_GAP_MS:
            # a link that is too slow holds up all of them, a busy machine one or the other
            heard = listen(system.url, picture_in_speech(model_of(system.url)))
            assert_same(heard, reference)
            gaps_ms.append(longest_gap_ms((came * 1000, len(pcm16) / BYTES_A_MS) for came, pcm16 in heard.pieces))
    assert min(gaps_ms) <= AUDIBLE_GAP_MS
