"""Fetches media of https, http and data URLs from permitted hosts."""

import asyncio
import ipaddress
import ssl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx
import pybase64

from gateway.errors import invalid
from gateway.media.decoding import Decoding
from gateway.media.frames import MAX_FRAMES, as_video
from gateway.media.kept import KeptMedia
from gateway.media.names import NameLookUps
from gateway.settings import GatewaySettings
from services.common.media import MediaError

FETCH_TIMEOUT_S = 20.0  # for a URL, redirects included
_MAX_REDIRECTS = 3  # followed for a URL
_MOST_BLANKS = 1024  # in base64 of the largest file
_PIECE = 65_536  # bytes
_MOST_ESCAPES = 2_000_000  # each takes 0.4 us, and other threads wait meanwhile
# Escapes that base64 may have, as encodeURIComponent writes them and as others do.
_CODES_OF_BASE64 = ("2B", "2b", "2F", "2f", "3D", "3d", "09", "0A", "0a", "0D", "0d", "20")
_OF_BASE64 = {f"%{code}": chr(int(code, 16)) for code in _CODES_OF_BASE64}
# Media types of unknown files, and of containers that can hold the kind.
_ANY_KIND = {"application/octet-stream", "binary/octet-stream"}
_OF_BOTH = {"application/mp4", "application/ogg", "application/x-matroska"}
_CONTAINERS = {
    "audio": _OF_BOTH | {f"video/{name}" for name in ("mp4", "webm", "ogg", "quicktime", "x-matroska", "3gpp", "mp2t")},
    "video": _OF_BOTH | {"image/gif"},
}
_HEADERS = {
    "accept-encoding": "identity",  # uncompressed only: a small file must not unfold into a large one
    "accept": "*/*",
    "user-agent": "Quartet/0 (gateway; fetches media of requests)",  # sites refuse those of libraries
}


@contextmanager
def media_errors(field: str) -> Iterator[None]:
    """Raises ApiError: 400 naming `field`, for a MediaError."""
    try:
        yield
    except MediaError as error:
        raise invalid(field, str(error), "invalid_media") from None


# Prefixes whose IPv6 addresses stand for an IPv4 address, and where in the 128 bits it is.
_EMBEDDED_IPV4 = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped
    (ipaddress.IPv6Network("::/96"), 0),  # IPv4-compatible
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)
_IPV6_UNICAST = ipaddress.IPv6Network("2000::/3")  # all assigned addresses; excludes site-local ones
# Some versions of Python take these for global.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "100.64.0.0/10",  # carriers' own, and Alibaba Cloud's metadata
            "168.63.129.16/32",  # of Azure's hosts
            "192.0.0.0/24",  # of protocols, and Oracle Cloud's metadata
            "192.88.99.0/24",  # 6to4 relays
            "198.18.0.0/15",  # benchmarks
            "2001::/23",  # of protocols, Teredo among them
        ),
    )
)


def is_public(address: str) -> bool:
    """Whether an IP address, and any IPv4 address embedded in it, is global unicast."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        for network, shift in _EMBEDDED_IPV4:
            if ip in network:
                return is_public(str(ipaddress.IPv4Address(int(ip) >> shift & 0xFFFFFFFF)))
        if ip not in _IPV6_UNICAST:
            return False
    return not _is_in(ip, _SPECIAL) and ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def _is_in(ip: _Ip, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    return any(ip in network for network in networks)


def permitted(host: str, addresses: Sequence[str], limits: GatewaySettings) -> str:
    """The address of `host` to connect to; a second look-up could differ. Raises MediaError: one is forbidden."""
    denied = list(map(ipaddress.ip_network, limits.media_denied_networks))
    if any(_is_in(ipaddress.ip_address(address.split("%")[0]), denied) for address in addresses):
        raise MediaError(f"the host {host!r} is at an address that this server does not fetch from; send a data URL")
    if not limits.media_private_addresses and not all(map(is_public, addresses)):
        raise MediaError(
            f"the host {host!r} is at a private or reserved address, and this server fetches from public ones only; "
            "send the file as a data URL"
        )
    return addresses[0]


@cache
def _authorities() -> ssl.SSLContext:
    """Read once in a process: that takes 20 ms."""
    return httpx.create_ssl_context(trust_env=False)


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


class Fetcher:
    """Fetches media under `limits`.

    Attributes:
        decoding: reads them.
        kept: those that clients gave a name.
    """

    def __init__(self, limits: GatewaySettings) -> None:
        self.limits, self.decoding = limits, Decoding(limits)
        self.kept = KeptMedia(limits.media_cache_bytes)
        self._names = NameLookUps()
        self._client = httpx.AsyncClient(
            verify=_authorities(),
            follow_redirects=False,  # each hop is checked first
            trust_env=False,  # a proxy would resolve names by itself
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none from one request to the next
            timeout=FETCH_TIMEOUT_S,
            # A connection is pinned to an address that was checked for one host: none is kept for another.
            limits=httpx.Limits(max_connections=100, max_keepalive_connections=0),
        )

    async def close(self) -> None:
        self.decoding.close()
        self._names.close()
        await self._client.aclose()

    async def get(self, url: str, kind: str, turn: AbstractAsyncContextManager[Any] = nullcontext()) -> bytes:
        """Fetches a file of `kind` "image", "audio" or "video". Its host's name is looked up in `turn`.

        Raises:
            MediaError: the URL is malformed, its host forbidden, its file too large, too slow or of another type.
        """
        if is_data_url(url):
            return await asyncio.to_thread(decode_data_url, url, kind, self.limits.media_max_bytes)
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await self._fetch(url, kind, turn)
        except (TimeoutError, httpx.TimeoutException):
            raise MediaError(f"the URL took longer than the {FETCH_TIMEOUT_S:g} s allowed") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # the latter: of a redirect
            raise MediaError(f"the URL cannot be fetched: {type(error).__name__}") from None

    async def get_or_decode(self, source: str, kind: str, max_bytes: int) -> bytes:
        """A file by its URL, or in base64 of at most `max_bytes`. Raises MediaError."""
        if source.partition(":")[0].lower() in ("data", "http", "https"):
            return await self.get(source, kind)
        return await asyncio.to_thread(decode_base64, source, max_bytes)

    async def _fetch(self, url: str, kind: str, turn: AbstractAsyncContextManager[Any]) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            parsed = _parse(url)
            port = parsed.port or (443 if parsed.scheme == "https" else 80)
            host = parsed.raw_host.decode()
            async with turn:
                addresses = await self._names.addresses(host, port)
            address = permitted(host, addresses, self.limits)
            async with self._client.stream(
                "GET",
                parsed.copy_with(host=address),
                headers=_HEADERS | {"host": parsed.netloc.decode()},
                # The certificate is the host's, not the address's.
                extensions={"sni_hostname": parsed.raw_host.decode()},
            ) as response:
                location = response.headers.get("location")
                if response.is_redirect and location is not None:
                    url = str(parsed.join(location))
                    continue
                if not response.is_success:
                    raise MediaError(f"the URL's server answered with status {response.status_code}")
                _check_type(response.headers.get("content-type", ""), kind)
                return await self._read(response)
        raise MediaError(f"the URL redirects more than {_MAX_REDIRECTS} times")

    async def _read(self, response: httpx.Response) -> bytes:
        most = self.limits.media_max_bytes
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_large(most)
        content = bytearray()
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > most:
                raise too_large(most)
        return bytes(content)


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise MediaError("not a valid URL") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise MediaError("only https, http and data URLs are read")
    if (parsed.port or 0) > 65535:
        raise MediaError("not a valid URL")
    return parsed.copy_with(username=None, password=None) if parsed.userinfo else parsed


def _check_type(content_type: str, kind: str) -> None:
    media_type = content_type.split(";")[0].strip().lower()
    fits = media_type.startswith(f"{kind}/") or media_type in _CONTAINERS.get(kind, ())
    if media_type and not fits and media_type not in _ANY_KIND:
        raise MediaError(f"the URL's media type is {media_type}, which is no {kind}")


def decode_data_url(url: str, kind: str, max_bytes: int) -> bytes:
    """Decodes a data URL (RFC 2397). Raises MediaError: malformed, too large, or of another kind."""
    header, comma, payload = url[5:].partition(",")
    if not comma:
        raise MediaError("a data URL is data:TYPE;base64,DATA")
    media_type, *parameters = header.split(";")
    _check_type(media_type, kind)
    if "base64" in (parameter.strip().lower() for parameter in parameters):
        for escape, sign in _OF_BASE64.items() if "%" in payload else ():
            payload = payload.replace(escape, sign)
        if kind == "video" and media_type.strip().lower() == "video/jpeg":
            if payload.count(",") >= MAX_FRAMES:
                raise MediaError(f"the video has more than {MAX_FRAMES} frames; send it as a file")
            return as_video([decode_base64(frame, max_bytes) for frame in payload.split(",")])
        return decode_base64(payload, max_bytes)
    if len(payload) > 3 * max_bytes or len(content := unescaped(payload)) > max_bytes:
        raise too_large(max_bytes)
    return content


def unescaped(text: str) -> bytes:
    """`text` without percent-encoding. Takes memory of its length: urllib makes an object of each escape.

    Raises:
        MediaError: there are too many of them.
    """
    if text.count("%") > _MOST_ESCAPES:
        raise MediaError("a file that is percent-encoded takes too long to read; send it in base64")
    data, content, at = text.encode(), bytearray(), 0
    while at < len(data):
        end = at + _PIECE
        cut = data.rfind(b"%", end - 2, end)  # an escape that the piece would cut
        end = cut if cut > at else end
        content += unquote_to_bytes(data[at:end])
        at = end
    return bytes(content)


def decode_base64(payload: str, max_bytes: int) -> bytes:
    """Decodes base64 as `from_base64`. Raises MediaError: not base64, or too large."""
    if len(payload) > 2 * max_bytes + _MOST_BLANKS:
        raise too_large(max_bytes)
    try:
        content = from_base64(payload)
    except ValueError:
        raise MediaError("not valid base64") from None
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return content


def from_base64(payload: str) -> bytes:
    """Decodes base64 with or without line ends, blanks and padding, as browsers do. Raises ValueError."""
    try:
        return pybase64.b64decode(payload, validate=True)
    except ValueError:
        plain = payload.encode().translate(None, b" \t\n\r\f\v").rstrip(b"=")  # `split` makes an object of each word
        return pybase64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)


def too_large(max_bytes: int) -> MediaError:
    return MediaError(f"the file is larger than the {max_bytes} bytes allowed")
