"""A TCP connection between a client and a server that a test cuts, or stops for a while."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Line:
    """Passes on what comes to its `port`.

    Attributes:
        most_bytes: of what goes to the server, and of what comes from it, over each connection from now on; the next
            byte waits. None: any number.
        full: set when bytes wait.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port, self.port = server_port, 0
        self.most_bytes: tuple[int | None, int | None] = (None, None)
        self.full = asyncio.Event()
        self._writers = set[asyncio.StreamWriter]()
        self._server: asyncio.Server | None = None

    async def join(self) -> None:
        """New connections pass."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """All connections break off; there are no new ones."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = self.most_bytes
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            self._writers.add(server_writer)
            await asyncio.gather(
                self._copy(reader, server_writer, up), self._copy(server_reader, writer, down), return_exceptions=True
            )
            self._writers.discard(server_writer)
        self._writers.discard(writer)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None) -> None:
        passed = 0
        try:
            while data := await reader.read(4096):
                if most is not None and passed + len(data) > most:
                    self.full.set()
                    await asyncio.Event().wait()
                writer.write(data)
                await writer.drain()
                passed += len(data)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def line_to(server_port: int) -> AsyncIterator[Line]:
    line = Line(server_port)
    await line.join()
    try:
        yield line
    finally:
        line.cut()
