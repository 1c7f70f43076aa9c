"""Media of requests: where it may come from and what it must be."""

import asyncio
import base64
import io
import struct
import textwrap
import threading
import wave
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from gateway.errors import ApiError
from gateway.media import fetch, names
from gateway.media.check import MediaFile, check, load_media
from gateway.media.fetch import Fetcher, MediaError, decode_base64, decode_data_url
from gateway.settings import GatewaySettings
from tests.support.samples.media import wav


def limits(**changes) -> GatewaySettings:
    return GatewaySettings(pipeline=Path("unused.yaml"), **changes)


@asynccontextmanager
async def site(pages: dict[str, bytes]):
    """An HTTP/1.1 server with raw responses by path; yields its origin and the requests it got."""
    requests: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        requests.append(head)
        response = pages[head.split()[1]]
        if response == b"slow":
            await asyncio.sleep(30)
        writer.write(response)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
    finally:
        server.close()


def page(content: bytes, content_type: str = "image/png", length: bool = True) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n"
    if length:
        head += f"content-length: {len(content)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + content


def redirect(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()


async def get(url: str, kind: str = "image", **changes) -> bytes:
    fetcher = Fetcher(limits(**changes))
    try:
        return await fetcher.get(url, kind)
    finally:
        await fetcher.close()


async def test_private_addresses_only_by_setting():
    async with site({"/a": page(b"abc")}) as (origin, requests):
        with pytest.raises(MediaError, match="private or reserved"):
            await get(f"{origin}/a")
        with pytest.raises(MediaError, match="private or reserved"):
            await get(f"{origin.replace('127.0.0.1', 'localhost')}/a")
        assert requests == []
        assert await get(f"{origin}/a", media_private_addresses=True) == b"abc"


async def test_the_checked_address_is_the_one_connected_to(monkeypatch):
    async with site({"/a": page(b"abc")}) as (origin, requests):
        port = origin.rsplit(":", 1)[1]
        answers = [["127.0.0.1"], ["192.0.2.1"]]  # a rebinding name: harmless when checked, another when connected to

        monkeypatch.setattr(names, "_addresses", lambda host, port: answers.pop(0))
        monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
        assert await get(f"http://rebind.example:{port}/a") == b"abc"
        assert len(answers) == 1
        assert f"host: rebind.example:{port}" in requests[0].lower()


async def test_every_address_of_a_name_is_checked(monkeypatch):
    monkeypatch.setattr(names, "_addresses", lambda host, port: ["8.8.8.8", "10.0.0.1"])
    with pytest.raises(MediaError, match="private or reserved"):
        await get("http://mixed.example/a")


async def test_each_redirect_is_checked(monkeypatch):
    pages = {"/ok": redirect("/a"), "/a": page(b"abc"), "/loop": redirect("/loop"), "/file": redirect("file:///x")}
    async with site(pages) as (origin, requests):
        assert await get(f"{origin}/ok", media_private_addresses=True) == b"abc"
        with pytest.raises(MediaError, match="more than 3 times"):
            await get(f"{origin}/loop", media_private_addresses=True)
        for strange in ("data:image/png;base64,YWJj", "data:,%", "//"):
            pages["/strange"] = redirect(strange)
            with pytest.raises(MediaError):
                await get(f"{origin}/strange", media_private_addresses=True)
        pages["/broken"] = redirect("http://[::1")
        with pytest.raises(MediaError, match="cannot be fetched"):
            await get(f"{origin}/broken", media_private_addresses=True)
        with pytest.raises(MediaError, match="only https, http"):
            await get(f"{origin}/file", media_private_addresses=True)
        pages["/out"] = redirect(f"{origin.replace('127.0.0.1', '127.0.0.2')}/a")
        monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
        with pytest.raises(MediaError, match="private or reserved"):
            await get(f"{origin}/out")
        assert "/out" in requests[-1]


async def test_size_time_type_and_status(monkeypatch):
    pages = {
        "/big": page(bytes(1001)),
        "/undeclared": page(bytes(1001), length=False),
        "/slow": b"slow",
        "/html": page(b"<html>", "text/html; charset=utf-8"),
        "/octets": page(b"abc", "application/octet-stream"),
        "/gone": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        "/cut": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\nconnection: close\r\n\r\nabc",
    }
    limits = {"media_private_addresses": True, "media_max_bytes": 1000}
    async with site(pages) as (origin, _):
        for path, says in [
            ("/big", "larger than the 1000"),
            ("/undeclared", "larger than the 1000"),
            ("/html", "text/html, which is no image"),
            ("/gone", "status 404"),
            ("/cut", "cannot be fetched"),
        ]:
            with pytest.raises(MediaError, match=says):
                await get(origin + path, **limits)
        assert await get(f"{origin}/octets", **limits) == b"abc"
        monkeypatch.setattr(fetch, "FETCH_TIMEOUT_S", 0.5)
        with pytest.raises(MediaError, match=r"longer than the 0\.5 s"):
            await get(f"{origin}/slow", **limits)


async def test_sound_may_come_in_a_container_of_videos():
    types = ("video/ogg", "application/mp4", "video/quicktime", "video/webm", "audio/x-anything")
    pages = {f"/{i}": page(b"abc", media_type) for i, media_type in enumerate(types)}
    async with site(pages | {"/image": page(b"abc", "image/png")}) as (origin, requests):
        for path in pages:
            assert await get(origin + path, "audio", media_private_addresses=True) == b"abc"
        with pytest.raises(MediaError, match="image/png, which is no audio"):
            await get(f"{origin}/image", "audio", media_private_addresses=True)
    assert all("user-agent: quartet/" in head.lower() for head in requests)


async def test_no_cookies_are_kept():
    pages = {"/a": page(b"abc").replace(b"connection:", b"set-cookie: a=b; path=/\r\nconnection:")}
    async with site(pages) as (origin, requests):
        fetcher = Fetcher(limits(media_private_addresses=True))
        for _ in range(2):
            await fetcher.get(f"{origin}/a", "image")
        await fetcher.close()
    assert "cookie" not in "".join(requests).lower()


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com:70000/x",
        "ftp://example.com/x",
        "file:///etc/passwd",
        "x",
        "http://",
        "http://[::1",
        "data:image",
    ],
)
async def test_other_urls_are_refused(url):
    with pytest.raises(MediaError):
        await get(url)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.0.0.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("fec0::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        ("2002:a00:1::", False),
        ("192.0.0.192", False),
        ("192.0.0.8", False),
        ("168.63.129.16", False),
        ("100.100.100.200", False),
        ("192.88.99.1", False),
        ("198.18.0.1", False),
        ("::ffff:168.63.129.16", False),
        ("64:ff9b::168.63.129.16", False),
        ("fd00:ec2::254", False),
    ],
)
def test_public_addresses(address, public):
    assert fetch.is_public(address) is public


async def test_further_addresses_may_be_forbidden():
    async with site({"/a": page(b"abc")}) as (origin, requests):
        for networks, refused in ((["127.0.0.0/8"], True), (["10.0.0.0/8", "2001:db8::/32"], False)):
            settings = {"media_private_addresses": True, "media_denied_networks": networks}
            if refused:
                with pytest.raises(MediaError, match="does not fetch from"):
                    await get(f"{origin}/a", **settings)
                assert requests == []
            else:
                assert await get(f"{origin}/a", **settings) == b"abc"
    with pytest.raises(ValueError, match="does not appear to be"):
        limits(media_denied_networks=["10.0.0.0/8/9"])


async def test_names_that_nobody_answers_hold_up_no_others(monkeypatch):
    """Not those of stages, which the event loop's threads look up; of media, no more than there are threads."""
    silent, waiting = threading.Event(), []

    def addresses(host: str, port: int) -> list[str]:
        waiting.append(host)
        silent.wait(60)
        return []

    monkeypatch.setattr(names, "_addresses", addresses)
    monkeypatch.setattr(names, "LOOK_UP_S", 0.05)
    fetcher = Fetcher(limits())
    files = [MediaFile(f"messages[0].content[{i}]", "image", f"http://{i}.example/a") for i in range(64)]
    try:
        with pytest.raises(ApiError, match=r"messages\[0\].content\[0\]: nobody answered within 0.05 s where"):
            await load_media(fetcher, files)
        assert len(waiting) <= names.MAX_OF_REQUEST + 8
        loop = asyncio.get_running_loop()
        assert await loop.getaddrinfo("127.0.0.1", 1)
        requests = [fetcher.get(f"http://{i}.example/b", "image") for i in range(200)]
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {MediaError}
        assert any("too many names" in str(outcome) for outcome in outcomes)
        assert await loop.getaddrinfo("127.0.0.1", 1)
    finally:
        silent.set()
        await fetcher.close()


def test_data_urls():
    data = base64.b64encode(b"abc").decode()
    assert decode_data_url(f"data:image/png;base64,{data}", "image", 10) == b"abc"
    assert decode_data_url("data:image/svg;x=y,a%20b", "image", 10) == b"a b"
    for url, says in [
        (f"data:text/html;base64,{data}", "which is no image"),
        ("data:image/png;base64,ab$=", "not valid base64"),
        ("data:image/png;base64,abcde", "not valid base64"),
        (f"data:image/png;base64,{data * 40}", "larger than"),
        ("data:image/png", "a data URL is"),
    ]:
        with pytest.raises(MediaError, match=says):
            decode_data_url(url, "image", 10)
    with pytest.raises(MediaError, match="not valid base64"):
        decode_base64("ä", 10)


BASE64 = base64.b64encode(bytes(range(256)) + b"!").decode()


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(textwrap.wrap(BASE64, 76)) + "\n",
        "\r\n".join(textwrap.wrap(BASE64, 64)),
        BASE64.rstrip("="),
        f" {BASE64}\t",
        "\n".join(textwrap.wrap(BASE64.rstrip("="), 60)),
    ],
)
def test_base64_as_programs_write_it(text):
    content = bytes(range(256)) + b"!"
    assert decode_base64(text, len(content)) == content
    assert decode_data_url(f"data:image/png;base64,{text}", "image", len(content)) == content
    assert decode_data_url(f"data:image/png;base64,{quote(text)}", "image", len(content)) == content
    with pytest.raises(MediaError, match="larger than"):
        decode_base64(text, len(content) - 1)


def picture(width: int, height: int, file_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, file_format)
    return file.getvalue()


def sound(samples: int, claimed_bytes: int | None = None) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, samples, "NONE", ""))
        writer.writeframes(bytes(2 * samples))
    content = bytearray(file.getvalue())
    if claimed_bytes is not None:
        content[4:8] = struct.pack("<I", min(claimed_bytes + 36, 0xFFFFFFFF))
        content[40:44] = struct.pack("<I", claimed_bytes)
    return bytes(content)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_good_images(file_format):
    check("image", picture(32, 20, file_format), limits())


def test_pictures_are_decoded_by_stages_only(monkeypatch):
    """One of 64 million pixels takes 192 MB, and a request may have many: also if a PNG lacks its end."""
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    for content in (picture(40, 40), picture(40, 40)[:-12], picture(40, 40, "JPEG")[:-2]):
        check("image", content, limits())


def test_good_sound():
    check("audio", sound(1600), limits())
    check("audio", sound(1600, claimed_bytes=0xFFFFFFFF), limits())  # of a program that wrote to a pipe


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        ("image", b"", "is empty"),
        ("image", b"nonsense", "corrupt"),
        ("image", picture(1, 1), "at least 4"),
        ("image", picture(40, 40), "more than the 1100 allowed"),
        ("audio", b"", "is empty"),
        ("audio", b"nonsense" * 100, "corrupt"),
        ("audio", sound(0), "its length is zero"),
        ("audio", sound(100, claimed_bytes=3 * 3600 * 32000), "is 10800 s long"),
        ("audio", sound(3 * 16000), "is 3 s long; at most 2 s"),
        ("audio", b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/x\n", "corrupt"),
        ("audio", picture(32, 32), "corrupt"),
        ("video", sound(1600), "no video track"),
    ],
)
def test_bad_files(kind, content, says):
    with pytest.raises(MediaError, match=says):
        check(kind, content, limits(media_max_image_pixels=1100, media_max_audio_s=2))


@pytest.mark.asyncio
async def test_a_file_that_takes_too_much_memory_to_check() -> None:
    """Names its part, and the next request is checked."""
    file = MediaFile("messages[0].content[1]", "audio", content=wav(1.0) + bytes(96 << 20))
    fetcher = Fetcher(limits(decoding_memory_bytes=64 << 20))
    with pytest.raises(ApiError, match=r"content\[1\]: .* more memory") as caught:
        await load_media(fetcher, [file])
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_media", file.field)
    file.content = wav(1.0)
    await load_media(fetcher, [file])
    await fetcher.close()


@pytest.mark.asyncio
async def test_a_request_of_many_files_leaves_processes_to_others(monkeypatch) -> None:
    fetcher, running, most = Fetcher(limits(media_max_parts=64)), 0, 0

    async def run(*_: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    monkeypatch.setattr(fetcher.decoding, "run", run)
    url = f"data:image/png;base64,{base64.b64encode(picture(8, 8)).decode()}"
    await load_media(fetcher, [MediaFile("a", "image", url) for _ in range(64)])
    assert most == 2
    await fetcher.close()
