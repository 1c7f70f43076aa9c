"""What a message of a peer may cost before a service sees it: its size is gRPC's limit, its parts are counted here.

Parsed, a part of two bytes can take a hundred. And grpc.aio gives a message that cannot be parsed status UNKNOWN.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from services.common.errors import InvalidInput, StageError
from services.common.rpc.status import abort

MAX_PARTS = 2**17  # texts, numbers, messages within messages
MAX_NUMBERS = 2**20  # in packed lists: token ids
MAX_OPERATIONS_BYTES = 4096  # of a message of health or reflection
SMALL_BYTES = 64 * 1024  # whose parts are not counted: they cannot be many
_MAX_DEPTH = 100  # protobuf's own
_VARINT_ENDS_ELSEWHERE = bytes(range(128, 256))
_FIXED_BYTES = {1: 8, 5: 4}  # by wire type

Behavior = Callable[[Any, Any], Any]
Descriptor = Any  # of a message: protobuf has classes of Python's and of C's
Handlers = Mapping[str, Any]  # of grpc.RpcMethodHandler


def deserializer(message_type: Descriptor, parse: Callable[[bytes], Any], most_bytes: int) -> Callable[[bytes], Any]:
    """`parse` for messages of a peer, which raises InvalidInput for what is too large or no such message."""

    def parsed(data: bytes) -> Any:
        if len(data) > most_bytes:
            raise InvalidInput("message", f"has {len(data)} bytes; at most {most_bytes} are taken")
        try:
            if len(data) > SMALL_BYTES:
                _Parts().count(data, 0, len(data), message_type, 0)
            return parse(data)
        except (DecodeError, IndexError) as error:  # IndexError: it ends within a part
            reason = f": {error}" if isinstance(error, _TooMany) else ""
            raise InvalidInput("message", f"cannot be read as a {message_type.full_name}{reason}") from None

    return parsed


class _TooMany(DecodeError):
    pass


class _Parts:
    """Counts the parts of a message, as they are encoded."""

    def __init__(self) -> None:
        self._parts, self._numbers = MAX_PARTS, MAX_NUMBERS

    def count(self, data: bytes, at: int, end: int, message_type: Descriptor, depth: int) -> None:
        """Raises _TooMany; DecodeError or IndexError: it is no such message."""
        if depth > _MAX_DEPTH:
            raise _TooMany(f"it is deeper than {_MAX_DEPTH} messages")
        inner = _inner(message_type)
        while at < end:
            self._parts -= 1
            if self._parts < 0:
                raise _TooMany(f"it has more than {MAX_PARTS} parts")
            tag, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
            wire_type = tag & 7
            if wire_type == 2:
                size, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
                if at + size > end:
                    raise DecodeError
                kind = inner.get(tag >> 3)
                if size and kind is not None:
                    if isinstance(kind, int):
                        self._count_numbers(data[at : at + size], kind)
                    else:
                        self.count(data, at, at + size, kind, depth + 1)
                at += size
            elif wire_type == 0:
                _, at = _varint(data, at)
            elif wire_type in _FIXED_BYTES:
                at += _FIXED_BYTES[wire_type]
            else:
                raise DecodeError
        if at > end:
            raise DecodeError

    def _count_numbers(self, packed: bytes, fixed_bytes: int) -> None:
        varints = fixed_bytes < 0
        self._numbers -= len(packed.translate(None, _VARINT_ENDS_ELSEWHERE)) if varints else len(packed) // fixed_bytes
        if self._numbers < 0:
            raise _TooMany(f"it has more than {MAX_NUMBERS} numbers")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(Value, where the next part begins)."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift >= 70:
            raise DecodeError


@cache
def _inner(message_type: Descriptor) -> dict[int, Descriptor | int]:
    """Of fields by their number: their message, or the bytes of a number in a packed list, -1 if that is not fixed."""
    fixed = {
        **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
        **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
    }
    found: dict[int, Descriptor | int] = {}
    for field in message_type.fields:
        if field.message_type is not None:
            found[field.number] = field.message_type
        elif field.is_repeated and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            found[field.number] = fixed.get(field.type, -1)
    return found


class GuardedServer:
    """What services are added to in the place of `server`: their requests are counted before they are parsed, and those
    that cannot be parsed are INVALID_ARGUMENT.

    Args:
        server: not started yet.
        most_bytes: of a request.
    """

    def __init__(self, server: grpc.aio.Server, most_bytes: int) -> None:
        self._server: Any = server  # grpc's types do not know registered methods
        self._most_bytes = most_bytes

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """Nothing: generated code adds the same as registered methods, too."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Handlers) -> None:
        service = descriptor_pool.Default().FindServiceByName(service_name)
        most_bytes = self._most_bytes if service_name.startswith("quartet.") else MAX_OPERATIONS_BYTES
        guarded = {
            name: _guarded(handler, service.methods_by_name[name].input_type, most_bytes)
            for name, handler in method_handlers.items()
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service_name, guarded)])
        self._server.add_registered_method_handlers(service_name, guarded)


def _guarded(handler: Any, message_type: Descriptor, most_bytes: int) -> Any:
    parse: Any = deserializer(message_type, handler.request_deserializer or bytes, most_bytes)
    if not handler.request_streaming:
        parse = kept(parse)
    streams = "stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary"
    kind = "_".join(streams)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(_refusing(getattr(handler, kind)), parse, handler.response_serializer)


def kept(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns the InvalidInput that `parse` raises: of a single request grpc.aio makes UNKNOWN of it, of a response
    None."""

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except InvalidInput as error:
            return error

    return parsed


def _refusing(behavior: Behavior) -> Behavior:
    """Ends the call with the status of an InvalidInput: its request, or what it raises for one of its requests."""
    if inspect.isasyncgenfunction(behavior):

        async def respond(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                if isinstance(request, StageError):
                    raise request
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response
            except StageError as error:
                await abort(context, error)

        return respond

    async def answer(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, StageError):
                raise request
            return await behavior(request, context)
        except StageError as error:
            await abort(context, error)

    return answer
