"""Handles as a hostile producer may write them: an error that names the field, and never a byte of anything else."""

import os
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.errors import InvalidInput
from services.common.stream.arena_files import ArenaReader, new_name
from services.common.stream.shared_memory import Arena, host_facts, obstacle
from services.common.stream.tensors import describe, to_torch
from tests.support.stage.shm import MIB, arena_directory

NAME = "quartet-" + "0123456789abcdef" * 2  # of no arena; each worker collects the same

ELEMENTS = 1000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena():
    with arena_directory() as directory:
        arena = Arena(directory, MIB)
        block = arena.allocate(4 * ELEMENTS)
        assert block
        await arena.fill(block, torch.arange(ELEMENTS, dtype=torch.float32))
        yield directory, arena
        arena.close()


def message(name: str, **changes) -> tensor_pb2.Tensor:
    """A good message, with changes to its handle."""
    message = describe(torch.empty(10, ELEMENTS // 10))
    handle = {"arena": name, "offset_bytes": 0, "size_bytes": 4 * ELEMENTS, "lease_id": 1} | changes
    message.shared_memory.CopyFrom(tensor_pb2.SharedMemory(**handle))
    return message


def read(message: tensor_pb2.Tensor, field: str, directory: Path) -> torch.Tensor:
    """The tensor in `field`, as a new reader of `directory` gives it."""
    resolve: Any = ArenaReader(directory).read  # of the two kinds of handles it takes one
    return to_torch(message, field, resolve)


def test_a_good_handle_is_read_in_place_and_unmapped_with_its_last_tensor(arena):
    directory, made = arena
    reader: Any = ArenaReader(directory)
    tensor = to_torch(message(made.name), "t", reader.read)
    assert torch.equal(tensor, torch.arange(ELEMENTS, dtype=torch.float32).view(10, -1))
    made._bytes[:4] = 255  # what the producer writes, the consumer sees: there is no copy
    assert tensor.view(-1)[0].isnan()
    made._bytes[:4] = 0
    row = tensor[3]
    del tensor, reader
    assert made.name in Path("/proc/self/maps").read_text()
    mapped = Path("/proc/self/maps").read_text().count(made.name)
    del row
    assert Path("/proc/self/maps").read_text().count(made.name) == mapped - 1  # the producer's own is left


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/dev/shm/quartet-" + "0" * 32,
        "../" + NAME,
        "quartet-" + "0" * 31,
        "quartet-" + "0" * 33,
        "quartet-" + "G" * 32,
        NAME + "\n",
        NAME + "\0",
        "psm_" + "0" * 32,
        NAME,  # not there
    ],
)
def test_names_that_are_no_arenas_are_refused(arena, name: str):
    with pytest.raises(InvalidInput) as refused:
        read(message(name), "source.states", arena[0])
    assert refused.value.field == "source.states.shared_memory.arena"


@pytest.mark.parametrize("kind", ["link", "directory", "fifo", "empty"])
def test_files_that_are_no_arenas_are_refused(arena, tmp_path: Path, kind: str):
    directory, path = arena[0], arena[0] / new_name()
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(4 * ELEMENTS))
    match kind:
        case "link":
            path.symlink_to(secret)
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "empty":
            path.touch()
    try:
        with pytest.raises(InvalidInput) as refused:
            read(message(path.name), "t", directory)
        assert refused.value.field == "t.shared_memory.arena"
    finally:
        path.rmdir() if kind == "directory" else path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_refused(arena):
    path = arena[0] / new_name()
    path.write_bytes(bytes(4 * ELEMENTS))
    os.chown(path, 12345, 12345)
    try:
        with pytest.raises(InvalidInput, match="not a file of this user"):
            read(message(path.name), "t", arena[0])
    finally:
        path.unlink()


BAD_HANDLES = {
    "past the end": ({"offset_bytes": MIB - 64}, [10, 100], "size_bytes"),
    "far past the end": ({"offset_bytes": 2**64 - 64}, [10, 100], "size_bytes"),
    "not aligned": ({"offset_bytes": 4}, [10, 100], "offset_bytes"),
    "nothing": ({"size_bytes": 0}, [0, 100], "size_bytes"),
    "too large for its shape": ({"size_bytes": 4 * ELEMENTS + 4}, [10, 100], "size_bytes"),
    "too small for its shape": ({"size_bytes": 4 * ELEMENTS - 4}, [10, 100], "size_bytes"),
    "larger than the arena": ({"size_bytes": 4 * MIB}, [MIB], "size_bytes"),
    "2^63 elements": ({}, [2**62, 2], "size_bytes"),
    "2^126 elements": ({}, [2**62, 2**62, 4], "size_bytes"),
    "2^64 bytes, which is 0 to a careless one": ({"size_bytes": 0}, [2**62], "size_bytes"),
}


@pytest.mark.parametrize("kind", BAD_HANDLES)
def test_handles_that_lie_are_refused(arena, kind: str):
    changes, shape, field = BAD_HANDLES[kind]
    bad = message(arena[1].name, **changes)
    bad.shape[:] = shape
    with pytest.raises(InvalidInput) as refused:
        read(bad, "t", arena[0])
    assert refused.value.field == f"t.shared_memory.{field}"


def test_shapes_and_dtypes_are_checked_first(arena):
    bad = message(arena[1].name)
    bad.shape[:] = [-10, -100]
    with pytest.raises(InvalidInput, match=r"t.shape: has a negative dimension"):
        read(bad, "t", arena[0])
    bad.dtype = 99  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match=r"t.dtype"):
        read(bad, "t", arena[0])
    with pytest.raises(InvalidInput, match=r"t.shared_memory: is taken in tensor streams only"):
        to_torch(message(arena[1].name), "t")


def decode(message: tensor_pb2.Tensor, directory: Path) -> tuple[torch.Tensor | None, str]:
    """The tensor "t", or the field that is at fault."""
    if message.HasField("ucx"):  # see test_ucx.py
        message.ClearField("ucx")
    try:
        return read(message, "t", directory), ""
    except InvalidInput as error:
        return None, error.field


int64s = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 1100)
uint64s = st.integers(0, 2**64 - 1) | st.integers(0, 2 * MIB) | st.just(4 * ELEMENTS)


@given(
    dtype=st.integers(-1, 9),
    shape=st.lists(int64s, max_size=4) | st.just([10, ELEMENTS // 10]),
    payload=st.one_of(
        st.binary(max_size=64),
        st.tuples(st.text(max_size=60) | st.none(), uint64s, uint64s),
        st.none(),
    ),
)
@settings(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_decoder_gives_a_tensor_or_names_a_field(arena, dtype, shape, payload):
    directory, made = arena
    fuzzed = tensor_pb2.Tensor(dtype=dtype, shape=shape)
    if isinstance(payload, bytes):
        fuzzed.inline = payload
    elif payload:
        name, offset_bytes, size_bytes = payload
        fuzzed.shared_memory.arena = made.name if name is None else name
        fuzzed.shared_memory.offset_bytes, fuzzed.shared_memory.size_bytes = offset_bytes, size_bytes
    tensor, fault = decode(fuzzed, directory)
    if tensor is None:
        assert fault.startswith("t.")
    else:
        assert list(tensor.shape) == shape
        tensor.sum()  # all of it can be read


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_decoder_stands_bytes_off_the_wire(arena, raw: bytes):
    fuzzed = tensor_pb2.Tensor()
    try:
        fuzzed.ParseFromString(raw)
    except Exception:  # not a message at all: gRPC refuses it before us
        return
    tensor, fault = decode(fuzzed, arena[0])
    assert tensor is not None or fault.startswith("t.")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"boot_id": "another"}, "other_host"),
        ({"device": 1}, "other_directory"),
        ({"inode": 1}, "other_directory"),
        ({"user_id": 12345}, "other_user"),
        (None, "not_offered"),
    ],
)
def test_only_who_sees_the_same_directory_is_lent_to(arena, change, reason: str):
    ours = host_facts(arena[0])
    capabilities = stream_pb2.ConsumerCapabilities(transports=[stream_pb2.TRANSPORT_INLINE])
    if change is not None:
        capabilities.transports.append(stream_pb2.TRANSPORT_SHARED_MEMORY)
        capabilities.shared_memory_host.CopyFrom(ours)
        for name, value in change.items():
            setattr(capabilities.shared_memory_host, name, value)
    assert obstacle(capabilities, ours) == reason
