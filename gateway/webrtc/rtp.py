"""A call's sound in RTP: what the client says, and what it hears."""

import asyncio
import random
import time
from collections.abc import Callable

from aiortc import clock
from aiortc.rtcdtlstransport import RTCDtlsTransport
from aiortc.rtcrtpreceiver import StreamStatistics
from aiortc.rtp import (
    AnyRtcpPacket,
    RtcpReceiverInfo,
    RtcpRrPacket,
    RtcpSenderInfo,
    RtcpSrPacket,
    RtpPacket,
    clamp_packets_lost,
)

from gateway.webrtc.jitter import JitterBuffer
from gateway.webrtc.opus import FRAME_MS, FRAME_SAMPLES, OPUS_RATE_HZ, OpusDecoder, OpusEncoder

_CLOCK = 1 << 32  # values of a timestamp
_FRAME_TICKS = OPUS_RATE_HZ * FRAME_MS // 1000
_MOST_FILLED = OPUS_RATE_HZ  # 1 s: a longer gap is no loss, but a microphone that was off
_MAX_SOURCES = 16  # SSRCs of one client, each of which costs memory
_TAIL_FRAMES = 5  # of silence after speech: a receiver fills what is missing with more of the last sound
_REPORT_S = 5.0


class AudioReceiver:
    """What the client says. `heard` gets mono PCM16 at 24 kHz as it comes."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self._heard, self._decoder, self._buffer = heard, OpusDecoder(), JitterBuffer()
        self._expected: int | None = None  # the next packet's timestamp
        self._source: int | None = None
        self._sources = set[int]()
        self._statistics: StreamStatistics | None = None
        self.concealed_ms = 0.0  # of sound that was missing

    async def _handle_rtp_packet(self, packet: RtpPacket, arrival_time_ms: int) -> None:
        if packet.ssrc != self._source:
            self._sources.add(packet.ssrc)
            if len(self._sources) > _MAX_SOURCES:
                raise ConnectionError("too many sources of sound in one call")
            self._source, self._buffer, self._expected = packet.ssrc, JitterBuffer(), None
            self._statistics = StreamStatistics(OPUS_RATE_HZ)
        if self._statistics is not None:
            self._statistics.add(packet)
        for each in self._buffer.add(packet):
            self._hear(each)

    def _hear(self, packet: RtpPacket) -> None:
        if not packet.payload:
            return
        if self._expected is not None:
            missing = (packet.timestamp - self._expected) % _CLOCK
            if 0 < missing <= _MOST_FILLED:
                self.concealed_ms += 1000 * missing / OPUS_RATE_HZ
                self._heard(self._decoder.conceal(missing))
        sound, ticks = self._decoder.decode(packet.payload)
        self._expected = (packet.timestamp + ticks) % _CLOCK if ticks else self._expected
        if sound:
            self._heard(sound)

    async def _handle_rtcp_packet(self, packet: AnyRtcpPacket) -> None:
        """Sender reports are for who plays several sources together."""

    def _handle_disconnect(self) -> None:
        """The call itself learns of it."""

    def report(self) -> list[RtcpReceiverInfo]:
        """For the client's own statistics."""
        heard = self._statistics
        if heard is None or self._source is None or heard.max_seq is None:
            return []
        lost = clamp_packets_lost(heard.packets_lost)
        highest = (heard.cycles + heard.max_seq) % _CLOCK
        return [RtcpReceiverInfo(self._source, heard.fraction_lost, lost, highest, heard.jitter % _CLOCK, 0, 0)]


class AudioSender:
    """What the client hears: a frame a packet, and nothing while nobody speaks.

    Args:
        transport: encrypts and sends.
        ssrc: of the stream.
        payload_type: of Opus.
        repairs: as in SdpOffer.
    """

    def __init__(self, transport: RTCDtlsTransport, ssrc: int, payload_type: int, repairs: bool) -> None:
        self._ssrc = ssrc
        self._transport, self._payload_type, self._encoder = transport, payload_type, OpusEncoder(repairs)
        self._number = random.randrange(1 << 15)  # the first half: a count that wraps early confuses SRTP (RFC 3711)
        self._begun, self._origin = time.monotonic(), random.randrange(_CLOCK)
        self._ticks, self._packets, self._octets = -_FRAME_TICKS, 0, 0
        self._tail: asyncio.TimerHandle | None = None
        self._is_silent = True
        self.packets = asyncio.Queue[bytes](500)

    def send(self, pcm16: bytes) -> None:
        """Queues a frame of mono PCM16 at 24 kHz, which is due now."""
        self._put(pcm16)
        if self._tail is not None:
            self._tail.cancel()
        self._tail = asyncio.get_running_loop().call_later(2 * FRAME_MS / 1000, self._fade, _TAIL_FRAMES)

    def _fade(self, left: int) -> None:
        if left == 0:
            self._is_silent = True
            return
        self._put(bytes(2 * FRAME_SAMPLES))
        self._tail = asyncio.get_running_loop().call_later(FRAME_MS / 1000, self._fade, left - 1)

    def _put(self, pcm16: bytes) -> None:
        now = round((time.monotonic() - self._begun) * OPUS_RATE_HZ)
        begins = self._is_silent and now > self._ticks + _FRAME_TICKS
        self._ticks = now if begins else self._ticks + _FRAME_TICKS
        payload = self._encoder.encode(pcm16)
        if not payload or self.packets.full():  # nobody takes them: the call ends
            return
        packet = RtpPacket(self._payload_type, int(begins), self._number, self._timestamp, self._ssrc, payload)
        self._is_silent, self._number = False, (self._number + 1) % (1 << 16)
        self._packets, self._octets = self._packets + 1, self._octets + len(payload)
        self.packets.put_nowait(packet.serialize())

    @property
    def _timestamp(self) -> int:
        return (self._origin + self._ticks) % _CLOCK

    async def run(self) -> None:
        """Sends packets until the connection ends. Raises ConnectionError."""
        while True:
            await self._transport._send_rtp(await self.packets.get())

    async def report(self, receiver: AudioReceiver) -> None:
        """Sends RTCP until the connection ends. Raises ConnectionError."""
        while True:
            await asyncio.sleep(_REPORT_S * random.uniform(0.5, 1.5))
            if self._packets:
                ntp = clock.current_ntp_time()
                elapsed = round((time.monotonic() - self._begun) * OPUS_RATE_HZ)
                at = (self._origin + elapsed) % _CLOCK
                sent = RtcpSenderInfo(ntp, at, self._packets % _CLOCK, self._octets % _CLOCK)
                packet = RtcpSrPacket(self._ssrc, sent, receiver.report())
            else:
                packet = RtcpRrPacket(self._ssrc, receiver.report())
            await self._transport._send_rtp(bytes(packet))

    async def _handle_rtcp_packet(self, packet: AnyRtcpPacket) -> None:
        """Reports of what was lost change nothing: the packets help by themselves."""

    def close(self) -> None:
        if self._tail is not None:
            self._tail.cancel()
