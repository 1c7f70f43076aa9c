"""One client's peer connection: aiortc's DTLS, SRTP and SCTP over our port, with our own sound."""

import asyncio
import functools
import random
import time
from collections.abc import Callable
from typing import Any, cast

import aiortc.rtcsctptransport
from aiortc.rtcdatachannel import RTCDataChannel
from aiortc.rtcdtlstransport import RTCCertificate, RTCDtlsTransport
from aiortc.rtcicetransport import RTCIceTransport
from aiortc.rtcrtpparameters import (
    RTCRtpCodecParameters,
    RTCRtpReceiveParameters,
    RTCRtpSendParameters,
)
from aiortc.rtcsctptransport import RTCSctpTransport

from gateway.tasks import cancel
from gateway.webrtc.ice import IceLite
from gateway.webrtc.opus import OPUS_RATE_HZ
from gateway.webrtc.port import UdpPort
from gateway.webrtc.rtp import AudioReceiver, AudioSender
from gateway.webrtc.sdp import Answerer, SdpOffer

# aiortc does not look for the path's limit, and its 1200 bytes with the headers of all layers do not fit into the 1280
# that each link of IPv6 carries, which many tunnels do not exceed.
aiortc.rtcsctptransport.USERDATA_MAX_LENGTH = 1100

CHANNEL = "oai-events"
_CONNECT_S = 15.0
_MAX_CHANNEL_BYTES = 16 * 1024 * 1024  # that wait for a client that does not take them
_CERTIFICATE_S = 24 * 3600


class PeerGone(Exception):
    """The connection has ended. The text says how."""


class PeerUnreached(PeerGone):
    """It has never begun."""


@functools.lru_cache(maxsize=1)
def _certificate(day: int) -> RTCCertificate:
    """One for all calls: making one takes as long as the rest of a handshake."""
    return RTCCertificate.generateCertificate()


class RtcPeer:
    """A connection that is answered, and begins when the client has the answer.

    Args:
        heard: takes the client's sound, mono PCM16 at 24 kHz.
        told: takes texts of the client's channel.
        opened: is called when texts can be sent.
    """

    def __init__(
        self,
        port: UdpPort,
        offer: SdpOffer,
        heard: Callable[[bytes], None],
        told: Callable[[str | bytes], None],
        opened: Callable[[], None],
    ) -> None:
        certificate = _certificate(int(time.time() // _CERTIFICATE_S))
        ssrc = random.randrange(1, 1 << 32)
        self._offer, self._told, self._opened = offer, told, opened
        self._ice = IceLite(port)
        self._dtls = RTCDtlsTransport(cast("RTCIceTransport", self._ice), [certificate])
        self._dtls._set_role("client" if offer.setup == "active" else "server")
        self._receiver = AudioReceiver(heard)
        self._sender = AudioSender(self._dtls, ssrc, offer.payload_type, offer.repairs)
        self._sctp = RTCSctpTransport(self._dtls) if offer.channel is not None else None
        self._channel: RTCDataChannel | None = None
        addresses = [(host, number or port.number) for host, number in port.told]
        self.answer = Answerer(self._ice.local_username, self._ice.local_password, addresses, certificate, ssrc).answer(
            offer
        )

    @property
    def concealed_ms(self) -> float:
        return self._receiver.concealed_ms

    def play(self, pcm16: bytes) -> None:
        """Sends a frame of mono PCM16 at 24 kHz; nothing before the client is there."""
        if self._dtls.state == "connected" and self._offer.hears:
            self._sender.send(pcm16)

    def tell(self, text: str) -> None:
        """Sends a text. Raises ValueError: the client's channel takes no text so long; PeerGone: the client takes
        none."""
        if self._channel is None or self._channel.readyState != "open":
            return
        if self._channel.bufferedAmount > _MAX_CHANNEL_BYTES:
            raise PeerGone("the client reads no events")
        self._channel.send(text)

    @property
    def has_channel(self) -> bool:
        """Whether the client has offered one."""
        return self._sctp is not None

    async def run(self) -> None:
        """Never returns. Raises PeerGone."""
        try:
            await self._connect()
            ended = asyncio.Event()
            self._dtls.on("statechange", ended.set)
            if self._dtls.state != "connected":  # meanwhile
                ended.set()
            works = (self._sender.run(), self._sender.report(self._receiver), ended.wait())
            tasks = [asyncio.ensure_future(work) for work in works]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel(*tasks)
            raise PeerGone("the client has closed the connection, or is not heard any more")
        finally:
            await asyncio.shield(self._close())

    async def _connect(self) -> None:
        """Raises PeerUnreached: the client does not reach us, or does not prove who it is."""
        try:
            await self._ice.connect(_CONNECT_S)
        except TimeoutError:
            raise PeerUnreached(f"the client did not reach the UDP port within {_CONNECT_S:g} s") from None
        codec = RTCRtpCodecParameters("audio/opus", OPUS_RATE_HZ, 2, self._offer.payload_type)
        received = RTCRtpReceiveParameters(codecs=[codec], muxId=self._offer.audio.rtp.muxId)
        if self._offer.speaks:
            self._dtls._register_rtp_receiver(self._receiver, received)
        self._dtls._register_rtp_sender(self._sender, RTCRtpSendParameters(codecs=[codec]))
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._dtls.start(self._offer.dtls)
        except TimeoutError:
            raise PeerUnreached(f"the handshake took longer than {_CONNECT_S:g} s") from None
        if self._dtls.state != "connected":
            raise PeerUnreached("the handshake failed")
        if self._sctp is not None:
            self._sctp.on("datachannel", self._open)
            await self._sctp.start(self._offer.sctp_capabilities, self._offer.sctp_port)

    def _open(self, channel: RTCDataChannel) -> None:
        if channel.label != CHANNEL or self._channel is not None:
            return
        self._channel = channel
        channel.on("message", cast("Callable[..., Any]", self._told))
        self._opened()

    async def _close(self) -> None:
        self._sender.close()
        if self._sctp is not None:
            await self._sctp.stop()
        await self._dtls.stop()
        self._ice.close()
        for each in filter(None, (self._dtls, self._sctp)):
            each.remove_all_listeners()
