"""The order of a call's packets, sound that is missing, and datagrams of strangers."""

import asyncio
import random
import socket

import numpy as np
import pytest
from aioice import stun
from aiortc.rtp import RtpPacket

from gateway.webrtc.ice import IceLite
from gateway.webrtc.jitter import JitterBuffer
from gateway.webrtc.opus import FRAME_SAMPLES, OpusEncoder
from gateway.webrtc.port import open_port
from gateway.webrtc.rtp import AudioReceiver
from gateway.webrtc.settings import WebRtcSettings

FRAME_TICKS = 960


def _packet(number: int, payload: bytes = b"x") -> RtpPacket:
    return RtpPacket(96, 0, number % 65_536, number * FRAME_TICKS % 2**32, 7, payload)


def _order(arrivals: list[int], buffer: JitterBuffer | None = None) -> list[int]:
    buffer = buffer or JitterBuffer()
    return [each.timestamp // FRAME_TICKS for number in arrivals for each in buffer.add(_packet(number))]


def test_packets_in_order_wait_for_nothing():
    buffer = JitterBuffer()
    for number in range(65_530, 65_545):
        assert [each.sequence_number for each in buffer.add(_packet(number))] == [number % 65_536]


def test_packets_that_overtake_are_put_back():
    assert _order([0, 2, 1, 3, 3, 1, 4]) == [0, 1, 2, 3, 4]


def test_a_lost_packet_is_given_up():
    assert _order([0, 1, 3, 4, 5]) == [0, 1, 3, 4, 5]


def test_a_client_that_begins_anew_is_heard():
    assert _order([0, 1, 3, 9000, 9001]) == [0, 1, 3, 9000, 9001]


def test_the_wait_fits_the_network():
    draw = random.Random(1)
    arrivals = sorted(range(2000), key=lambda number: number * 20 + draw.uniform(0, 100))  # 100 ms of jitter
    buffer = JitterBuffer()
    assert _order(arrivals[:1000], buffer) == sorted(_order(arrivals[:1000]))
    late = buffer.late
    heard = _order(arrivals[1000:], buffer)
    assert heard == sorted(heard)
    assert buffer.late - late <= 5  # of 1000
    _order(list(range(2000, 10_000)), buffer)
    assert buffer.wait == 2


def _speech(frames: int) -> list[bytes]:
    """Packets of a voice-like sound."""
    encoder, times = OpusEncoder(repaired=False), np.arange(frames * FRAME_SAMPLES) / 24_000
    sound = (
        (6000 * np.sum([np.sin(2 * np.pi * 150 * k * times) / k for k in range(1, 6)], axis=0)).astype("<i2").tobytes()
    )
    size = 2 * FRAME_SAMPLES
    return [encoder.encode(sound[at : at + size]) for at in range(0, len(sound), size)]


async def _heard(packets: list[RtpPacket]) -> tuple[np.ndarray, AudioReceiver]:
    pieces = list[bytes]()
    receiver = AudioReceiver(pieces.append)
    for packet in packets:
        await receiver._handle_rtp_packet(packet, 0)
    return np.frombuffer(b"".join(pieces), "<i2").astype(int), receiver


async def test_a_lost_packet_is_concealed_in_its_place():
    packets = [_packet(number, payload) for number, payload in enumerate(_speech(60))]
    whole, _ = await _heard(packets)
    patched, receiver = await _heard([each for number, each in enumerate(packets) if number != 30])
    assert receiver.concealed_ms == 20
    assert abs(len(patched) - len(whole)) <= 2
    gap = slice(30 * FRAME_SAMPLES, 31 * FRAME_SAMPLES)
    assert np.abs(patched[gap]).mean() > 0.3 * np.abs(whole[gap]).mean()  # silence would be heard
    after = slice(40 * FRAME_SAMPLES, None)
    assert np.abs(patched[after][: len(whole[after])]).mean() == pytest.approx(np.abs(whole[after]).mean(), rel=0.2)


async def test_a_long_gap_is_silence():
    packets = [_packet(number, payload) for number, payload in enumerate(_speech(60))]
    heard, receiver = await _heard(packets[:20] + packets[50:])
    assert receiver.concealed_ms == 600
    assert abs(len(heard) - (60 * FRAME_SAMPLES)) < 200
    assert np.abs(heard[30 * FRAME_SAMPLES : 48 * FRAME_SAMPLES]).max() < 50


@pytest.mark.parametrize("payload", [b"", b"\xff" * 3, b"\x00", b"\xfc", bytes(1400), b"abc" * 300])
async def test_payloads_that_are_no_sound(payload):
    speech = _speech(3)
    heard, _ = await _heard([_packet(0, speech[0]), _packet(1, payload), _packet(2, speech[2])])
    assert len(heard) < 10 * 24_000


async def test_a_client_of_many_sources_is_refused():
    receiver = AudioReceiver(lambda _: None)
    for source in range(16):
        await receiver._handle_rtp_packet(RtpPacket(96, 0, 1, 1, source, b"x"), 0)
    with pytest.raises(ConnectionError):
        await receiver._handle_rtp_packet(RtpPacket(96, 0, 1, 1, 16, b"x"), 0)


def _check(name: str, password: str | None, transaction: bytes = b"t" * 12) -> bytes:
    message = stun.Message(stun.Method.BINDING, stun.Class.REQUEST, transaction)
    message.attributes["USERNAME"] = name
    message.attributes["USE-CANDIDATE"] = None
    if password is not None:
        message.add_message_integrity(password.encode())
    return bytes(message)


async def test_strangers_get_no_answer_and_leave_nothing():
    port = await open_port("127.0.0.1", 0, [])
    agent = IceLite(port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        stranger.connect(("127.0.0.1", port.number))
        draw = random.Random(0)
        own = _check(f"{agent.local_username}:x", agent.local_password)
        shapes = [b"", b"\x00", b"\x16" * 200, b"\x80" * 172, draw.randbytes(1400), own[:-4], own[:19], own[:40]]
        shapes += [_check("nobody:x", "y"), _check(f"{agent.local_username}:x", "wrong")]
        shapes += [
            _check(f"{agent.local_username}:x", None),
            b"\x00\x01\xff\xff\x21\x12\xa4\x42" + bytes(12) + b"\x00\x06\xff\xff",
        ]
        shapes += [
            own[:at] + bytes([own[at] ^ 1]) + own[at + 1 :] for at in range(len(own) - 8)
        ]  # before the fingerprint
        for shape in shapes:
            stranger.send(shape)
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert (port.agents, port.known_addresses, list(agent.addresses)) == (1, 0, [])
        with pytest.raises(BlockingIOError):
            stranger.recv(2000)
        stranger.send(own)
        await agent.connect(5)
        assert stun.parse_message(stranger.recv(2000)).message_class == stun.Class.RESPONSE
    agent.close()
    assert (port.agents, port.known_addresses) == (0, 0)
    port.close()


async def test_nobody_takes_the_datagrams_of_another_call():
    port = await open_port("127.0.0.1", 0, [])
    one, other = IceLite(port), IceLite(port)
    port.datagram_received(_check(f"{one.local_username}:x", one.local_password), ("127.0.0.1", 9))
    port.datagram_received(_check(f"{other.local_username}:x", other.local_password), ("127.0.0.1", 9))
    port.datagram_received(b"\x80rtp", ("127.0.0.1", 9))
    assert await one._recv() == b"\x80rtp"
    assert not other.addresses
    one.close()
    port.datagram_received(_check(f"{other.local_username}:x", other.local_password), ("127.0.0.1", 9))
    assert other.addresses
    other.close()
    port.close()


def test_addresses_that_clients_are_told():
    told = WebRtcSettings(addresses=["203.0.113.7", "203.0.113.7:30478", "2001:db8::1", "[2001:db8::1]:5"]).announced
    assert told == [("203.0.113.7", 0), ("203.0.113.7", 30478), ("2001:db8::1", 0), ("2001:db8::1", 5)]
    assert ("127.0.0.1", 0) in WebRtcSettings().announced
    assert WebRtcSettings(udp_host="192.0.2.1").announced == [("192.0.2.1", 0)]
    with pytest.raises(ValueError, match="is no IP address"):
        WebRtcSettings(addresses=["example.com"])
