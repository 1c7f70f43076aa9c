"""The client's offer, and the answer to it (RFC 8829, the part that one call needs)."""

from collections.abc import Iterable
from dataclasses import dataclass

from aiortc.rtcdtlstransport import RTCCertificate, RTCDtlsParameters
from aiortc.rtcsctptransport import RTCSctpCapabilities
from aiortc.sdp import MediaDescription, SessionDescription

from gateway.errors import ApiError, invalid
from gateway.webrtc.port import Address

MAX_OFFER_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 256 * 1024  # of a client's event; browsers send no more either
_MAX_SECTIONS = 16
_BAD = (
    ValueError,
    AssertionError,
    LookupError,
    TypeError,
    AttributeError,
    StopIteration,
)  # what aiortc's parser raises
_SCTP_PORT = 5000
_PRIORITY = 2130706431  # of a host's candidate, the first of several (RFC 8445, 5.1.2.1)
_ANSWERS = {"sendrecv": "sendrecv", "recvonly": "sendonly", "sendonly": "recvonly", "inactive": "inactive"}
_SETUP = {"active": "passive", "passive": "active", "actpass": "active"}


@dataclass(frozen=True)
class SdpOffer:
    """What a client offers.

    Attributes:
        payload_type: of Opus, in RTP.
        dtls: the client's fingerprints.
        setup: ours: "active" begins the handshake of DTLS.
        repairs: whether the client fills gaps by what the next packet repeats.
        channel: the section of the data channel, if there is one.
        hears, speaks: whether the client receives sound, and sends it.
    """

    description: SessionDescription
    audio: MediaDescription
    channel: MediaDescription | None
    payload_type: int
    dtls: RTCDtlsParameters
    setup: str
    repairs: bool

    @property
    def hears(self) -> bool:
        return (self.audio.direction or "sendrecv") in ("sendrecv", "recvonly")

    @property
    def speaks(self) -> bool:
        return (self.audio.direction or "sendrecv") in ("sendrecv", "sendonly")

    @property
    def sctp_port(self) -> int:
        return (self.channel and self.channel.sctp_port) or _SCTP_PORT

    @property
    def sctp_capabilities(self) -> RTCSctpCapabilities:
        """RFC 8841, 6: 64 KiB if the client does not say more."""
        return (self.channel and self.channel.sctpCapabilities) or RTCSctpCapabilities(maxMessageSize=64 * 1024)


def _refusal(reason: str) -> ApiError:
    return invalid("sdp", reason, "invalid_offer")


def read_offer(text: str) -> SdpOffer:
    """Raises ApiError: 400, no offer of a call with sound."""
    if len(text) > MAX_OFFER_BYTES:
        raise _refusal(f"has more than {MAX_OFFER_BYTES} characters")
    if not text.startswith("v="):
        raise _refusal("is no session description: send the `sdp` of RTCPeerConnection.createOffer()")
    try:
        description = SessionDescription.parse(text)
    except _BAD:
        raise _refusal("cannot be read as a session description; send what the browser made, unchanged") from None
    return _offer(description)


def _offer(description: SessionDescription) -> SdpOffer:
    media = description.media
    if len(media) > _MAX_SECTIONS:
        raise _refusal(f"has more than {_MAX_SECTIONS} sections")
    bundles = [group.items for group in description.group if group.semantic == "BUNDLE"]
    # one without a port is refused by the client itself, but for one that goes by another's port (RFC 9143, 6)
    offered = [each for each in media if each.port or any(each.rtp.muxId in items for items in bundles)]
    audio = next((each for each in offered if each.kind == "audio"), None)
    opus = audio and next((each for each in audio.rtp.codecs if each.mimeType.lower() == "audio/opus"), None)
    if audio is None or opus is None or opus.payloadType is None:
        raise _refusal("has no audio with Opus; add the microphone's track before createOffer()")
    channel = next((each for each in offered if each.kind == "application"), None)
    for section in filter(None, (audio, channel)):
        if section.rtp.muxId == "":
            raise _refusal("has a section without a=mid")
        if section.dtls is None or not section.dtls.fingerprints:
            raise _refusal("has no a=fingerprint with a=setup: calls are encrypted")
    if channel is not None and not any({audio.rtp.muxId, channel.rtp.muxId} <= set(items) for items in bundles):
        raise _refusal("does not bundle its audio and its channel (a=group:BUNDLE): one port serves both")
    if not audio.rtcp_mux:
        raise _refusal("has no a=rtcp-mux: one port serves RTP and RTCP")
    assert audio.dtls is not None
    role = {"client": "active", "server": "passive"}.get(audio.dtls.role, "actpass")
    fingerprints = RTCDtlsParameters(fingerprints=audio.dtls.fingerprints)
    repairs = str(opus.parameters.get("useinbandfec", "0")) == "1"
    return SdpOffer(description, audio, channel, opus.payloadType, fingerprints, _SETUP[role], repairs)


@dataclass(frozen=True)
class Answerer:
    """Our end of a call, as an answer tells it."""

    username: str
    password: str
    addresses: Iterable[Address]
    certificate: RTCCertificate
    ssrc: int

    def answer(self, offer: SdpOffer) -> str:
        """Each section of the offer has one in the answer, in order; those that we do not serve have port 0."""
        served = [each for each in offer.description.media if each in (offer.audio, offer.channel)]
        lines = ["v=0", "o=- 1 1 IN IP4 0.0.0.0", "s=-", "t=0 0", "a=ice-lite"]
        lines.append(f"a=group:BUNDLE {' '.join(each.rtp.muxId for each in served)}")
        lines.append("a=msid-semantic: WMS *")
        for section in offer.description.media:
            if section is offer.audio:
                lines += [*self._audio(offer), *self._transport(offer)]
            elif section is offer.channel:
                lines += [*_channel(section), *self._transport(offer)]
            else:
                lines.append(f"m={section.kind} 0 {section.profile} {' '.join(map(str, section.fmt))}")
                lines += ["c=IN IP4 0.0.0.0", *filter(None, [section.rtp.muxId and f"a=mid:{section.rtp.muxId}"])]
                lines.append("a=inactive")
        return "\r\n".join([*lines, ""])

    def _audio(self, offer: SdpOffer) -> list[str]:
        kind = offer.payload_type
        return [
            f"m=audio 9 {offer.audio.profile} {kind}",
            "c=IN IP4 0.0.0.0",
            f"a=mid:{offer.audio.rtp.muxId}",
            f"a={_ANSWERS[offer.audio.direction or 'sendrecv']}",
            "a=msid:quartet speech",
            "a=rtcp-mux",
            f"a=rtpmap:{kind} opus/48000/2",
            f"a=fmtp:{kind} minptime=10",  # no useinbandfec: PyAV's decoder cannot read what it would repeat
            f"a=ssrc:{self.ssrc} cname:quartet",
        ]

    def _transport(self, offer: SdpOffer) -> list[str]:
        candidates = (
            f"a=candidate:{number} 1 udp {_PRIORITY - number} {host} {port} typ host"
            for number, (host, port) in enumerate(self.addresses, 1)
        )
        prints = (f"a=fingerprint:{each.algorithm} {each.value}" for each in self.certificate.getFingerprints())
        return [
            *candidates,
            "a=end-of-candidates",
            f"a=ice-ufrag:{self.username}",
            f"a=ice-pwd:{self.password}",
            *prints,
            f"a=setup:{offer.setup}",
        ]


def _channel(section: MediaDescription) -> list[str]:
    return [
        f"m=application 9 {section.profile} webrtc-datachannel",
        "c=IN IP4 0.0.0.0",
        f"a=mid:{section.rtp.muxId}",
        f"a=sctp-port:{_SCTP_PORT}",
        f"a=max-message-size:{MAX_MESSAGE_BYTES}",
    ]
