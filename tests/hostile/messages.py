"""Messages that cost much, made from the descriptors of services: bytes that follow those of an honest request, into
which protobuf merges them."""

import importlib
import math
import pkgutil
import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import quartet.v1

MIB = 1024 * 1024
TEXT_BYTES, ITEMS = MIB, 1_000_000
Descriptor = Any  # of a message, a field, a method, a service: protobuf has classes of Python's and of C's
Path = tuple[Descriptor, ...]

_FLOATS = {FieldDescriptor.TYPE_DOUBLE: "<d", FieldDescriptor.TYPE_FLOAT: "<f"}
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def services() -> Iterator[Descriptor]:
    """All that a stage may serve."""
    found = [
        importlib.import_module(f"quartet.v1.{module.name}") for module in pkgutil.iter_modules(quartet.v1.__path__)
    ]
    for module in (*found, health_pb2, reflection_pb2):
        if module.__name__.endswith("_pb2"):
            yield from module.DESCRIPTOR.services_by_name.values()


def methods() -> dict[str, Descriptor]:
    """By their names, "SERVICE/METHOD"."""
    return {f"{service.full_name}/{method.name}": method for service in services() for method in service.methods}


def paths(message_type: Descriptor, before: Path = (), seen: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Ways to all fields below `message_type`; messages that are in themselves once."""
    for field in message_type.fields:
        yield (*before, field)
        inner = field.message_type
        if inner is not None and inner.full_name not in seen:
            yield from paths(inner, (*before, field), seen | {message_type.full_name})


def first_paths(message_type: Descriptor) -> dict[str, Path]:
    """The shortest way to each field, by its full name."""
    found: dict[str, Path] = {}
    for path in sorted(paths(message_type), key=len):
        found.setdefault(path[-1].full_name, path)
    return found


def has_size(field: Descriptor) -> bool:
    """Whether the client decides how large it is."""
    return field.is_repeated or field.type in _TEXTS


def varint(value: int) -> bytes:
    value, data = value % 2**64, bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def part(field: Descriptor, data: bytes) -> bytes:
    """A field of which `data` is the content."""
    return varint(field.number << 3 | 2) + varint(len(data)) + data


def at(path: Path, encoded: bytes) -> bytes:
    """A message that has the fields `encoded` in the message of the last field of `path`."""
    for field in reversed(path[:-1]):
        encoded = part(field, encoded)
    return encoded


def attacks(message_type: Descriptor) -> Iterator[tuple[str, bytes]]:
    """(what, bytes) for each field below `message_type`."""
    for name, path in first_paths(message_type).items():
        for what, encoded in _values(path[-1]):
            yield f"{what} at {name}", at(path, encoded)


def _values(field: Descriptor) -> Iterator[tuple[str, bytes]]:
    if field.type in _TEXTS:
        yield "a long text", part(field, b"x" * TEXT_BYTES)
        yield "a text that is no UTF-8", part(field, b"\xff" * 8)
        yield "a long text of wide characters", part(field, "\u20ac".encode() * 10_000)
        yield "brackets", part(field, b"[" * 20_000)
        yield "a zero byte", part(field, b"a\0/../b")
    if field.is_repeated:
        item = part(field, b"") if field.message_type or field.type in _TEXTS else varint(field.number << 3) + b"\x01"
        yield "a million items", item * ITEMS
        yield "a thousand items", item * 1000
        if field.message_type is None and field.type not in _TEXTS:
            yield "two million packed items", part(field, b"\x01" * 2 * ITEMS)
    if field.message_type is not None or field.type in _TEXTS:
        return
    if layout := _FLOATS.get(field.type):
        wire_type = 1 if layout == "<d" else 5
        for value in (math.nan, math.inf, -math.inf, -1.0, 3e38):
            yield f"{value}", varint(field.number << 3 | wire_type) + struct.pack(layout, value)
        return
    for value in (-1, -(2**63), 2**63 - 1, 2**31 - 1, -(2**31), 2**32 - 1, 2**64 - 1):
        yield f"{value}", varint(field.number << 3) + varint(value)
