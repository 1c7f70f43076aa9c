"""The channel of rows inside a host: who may send, and what is sent."""

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest
import torch
import zmq

from services.common.stream.rows import Rows
from services.thinker.environment import scratch_dir, sockets_dir
from services.thinker.plugin.row_channel import RowReceiver, RowSender

NOBODY = 65534
BROKEN: list[list[bytes]] = [
    [b"1234", b"5678"],
    [b"alone"],
    [b"\x94\xa4name\x90\xa5float\x90", b"123"],
    [b"\x94\xa4name\x90\xacno_such_type\x90", b"1234"],
]


def connects_as_nobody(file: Path) -> type[OSError] | None:
    """What another user gets."""
    pid = os.fork()
    if not pid:
        try:
            os.setuid(NOBODY)
            socket.socket(socket.AF_UNIX).connect(str(file))
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 255)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return type(OSError(status, "")) if status else None


@pytest.mark.asyncio
async def test_a_message_that_cannot_be_read_is_dropped_and_rows_go_on() -> None:
    with scratch_dir():
        receiver = RowReceiver(sockets_dir())
        received: list[Rows] = []
        with receiver.deliver(7, received.append) as delivery:
            with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
                stranger.connect(receiver.address)
                for frames in BROKEN:
                    stranger.send_multipart(frames)
                    await asyncio.sleep(0.05)
            sender = RowSender(receiver.address)
            sender.send("states", [(7, 3, 2)], torch.ones(2, 4))
            await delivery.wait(2)
            assert not receiver.failed
            await asyncio.to_thread(sender.close)
        assert [(rows.name, rows.first_position) for rows in received] == [("states", 3)]
        await receiver.close()


@pytest.mark.asyncio
async def test_the_socket_is_for_its_own_user() -> None:
    with scratch_dir() as path:
        receiver = RowReceiver(sockets_dir())
        file = Path(receiver.address.removeprefix("ipc://"))
        assert file.is_socket()
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        try:
            if os.getuid() == 0:
                assert connects_as_nobody(file) is PermissionError
        finally:
            await receiver.close()
    assert not path.exists()


def test_a_long_path_of_temporary_files_has_sockets_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with scratch_dir() as path:
        sockets = Path(sockets_dir())
        assert path.parent == deep
        assert len(str(sockets)) < 64
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert not sockets.exists()
