"""Hundreds of calls by WebRTC, which end in every way while a stranger sends all that a network carries."""

import asyncio
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from gateway.webrtc import ice, peer
from tests.support.clients.caller import CALLS, SDP, Caller, calling
from tests.support.systems.call_ends import ENDS, ask
from tests.support.systems.calls import CallServer, call_server

pytestmark = pytest.mark.weekly
CALLS_IN_ALL, AT_A_TIME, NOISE_PER_S = 200, 8, 10_000


@contextmanager
def stranger(number: int) -> Iterator[None]:
    """Sends NOISE_PER_S datagrams a second to a UDP port: noise, what looks like sound, and checks of nobody's."""
    draw, over = random.Random(0), threading.Event()
    check = b"\x00\x01\x00\x08\x21\x12\xa4\x42"
    shapes = [shape for _ in range(50) for shape in (draw.randbytes(200), b"\x80" + draw.randbytes(171))]
    shapes += [check + draw.randbytes(12) + b"\x00\x06\x00\x04abcd" for _ in range(50)]

    def send() -> None:
        begun, sent = time.monotonic(), 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            while not over.wait(max(0.0, begun + sent / NOISE_PER_S - time.monotonic())):
                for shape in shapes:
                    sender.sendto(shape, ("127.0.0.1", number))
                sent += len(shapes)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def held() -> dict[str, int]:
    """What a process has of its calls."""
    gc.collect()
    process = psutil.Process(os.getpid())
    return {
        "files": process.num_fds(),
        "tasks": len(asyncio.all_tasks()),
        "peers": sum(isinstance(each, peer.RtcPeer) for each in gc.get_objects()),
    }


async def _never_comes(server: CallServer) -> None:
    caller = Caller()
    answer = await caller.dial(server.gateway.http)
    assert answer.status_code == 201
    await caller.close()


async def _is_refused(server: CallServer) -> None:
    answer = await server.gateway.http.post(CALLS, content="v=0", headers=SDP)
    assert answer.status_code == 400


async def test_nothing_is_left_of_200_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ice, "CONSENT_S", 7.0)  # aiortc's client asks each 4 to 6 s
    monkeypatch.setattr(peer, "_CONNECT_S", 5.0)
    async with call_server() as server:

        async def one(number: int) -> None:
            kind = number % (len(ENDS) + 2)
            if kind < len(ENDS):
                async with calling(server.gateway.http) as caller:
                    await ENDS[kind](server, caller)
            else:
                await (_never_comes, _is_refused)[kind - len(ENDS)](server)

        async def some(numbers: list[int]) -> None:
            for number in numbers:
                await one(number)

        await some(list(range(len(ENDS) + 2)))  # what is made once
        await server.all_gone()
        before = held()
        await asyncio.gather(*(some(list(range(first, CALLS_IN_ALL, AT_A_TIME))) for first in range(AT_A_TIME)))
        await server.all_gone()
        await server.gateway.until(lambda: held()["peers"] <= before["peers"])
        after = held()
        assert after["tasks"] <= before["tasks"] + 2
        assert after["files"] <= before["files"] + 5  # connections of the client that are kept


async def test_strangers_do_not_disturb_a_call() -> None:
    async with call_server() as server, calling(server.gateway.http) as caller:
        with stranger(server.calls.port.number):
            await asyncio.sleep(2)
            assert (server.calls.port.agents, server.calls.port.known_addresses) == (1, 1)
            await ask(caller)
            await caller.until("output_audio_buffer.stopped")
            assert caller.heard
            assert (server.calls.port.agents, server.calls.port.known_addresses) == (1, 1)
