"""TLS in front of a gateway, as a proxy or an Ingress puts it there."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def tls_front(port: int, certificates: Path, host: str = "127.0.0.1") -> Iterator[int]:
    """A port of this machine that takes TLS with `tls.crt` and `tls.key` of a directory, and hands what comes through
    to `port` in the clear."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_gateway, to_gateway = await asyncio.open_connection(host, port)
        await asyncio.gather(pump(reader, to_gateway), pump(from_gateway, writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(taken, host, 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()
