"""Every RPC and every field of it has its row; no message costs more than its length before a service sees it."""

import resource
import subprocess
import sys
import time

import pytest

from quartet.v1 import stream_pb2, thinker_pb2
from services.common.errors import InvalidInput
from services.common.rpc.channels import MAX_MESSAGE_BYTES
from services.common.rpc.guard import deserializer
from tests.hostile import services
from tests.hostile.messages import MIB, first_paths, has_size, methods, part
from tests.hostile.meter import MAX_HELD_S

GENERATE, RESPONSE = thinker_pb2.GenerateRequest, stream_pb2.SubscribeResponse
START, MESSAGES = (
    GENERATE.DESCRIPTOR.fields_by_name["start"],
    thinker_pb2.GenerateStart.DESCRIPTOR.fields_by_name["messages"],
)


def test_every_rpc_has_its_costs_in_the_table():
    found = methods()
    assert set(services.RPCS) == set(found)
    for name, costs in services.RPCS.items():
        waits = found[name].client_streaming and name.startswith("quartet.v1.") and services.CLAIM not in costs
        assert (services.START in costs, services.MESSAGE in costs) == (waits, True), name


def test_every_field_that_a_client_gives_a_size_has_its_limit_in_the_table():
    types = [*(method.input_type for method in methods().values()), RESPONSE.DESCRIPTOR]  # producers are clients', too
    sized = {name for kind in types for name, path in first_paths(kind).items() if has_size(path[-1])}
    assert {f"{message}.{field}" for message, fields in services.FIELDS.items() for field in fields} == sized


def refusal(data: bytes, message: type = GENERATE) -> str:
    """What a message is refused with; "" if it is not. It takes little time."""
    parse, began = deserializer(message.DESCRIPTOR, message.FromString, MAX_MESSAGE_BYTES), time.thread_time()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        parse(data)
    except InvalidInput as error:
        return error.reason
    finally:
        assert time.thread_time() - began < MAX_HELD_S
    return ""


def test_a_messages_parts_are_counted_before_it_is_parsed():
    empty = part(MESSAGES, b"")
    most = 130_000
    assert "more than 131072 parts" in refusal(part(START, empty * 6_000_000))
    assert refusal(part(START, empty * most)) == ""
    within = part(MESSAGES, part(thinker_pb2.ChatMessage.DESCRIPTOR.fields_by_name["content"], b"") * 2_000_000)
    assert "more than 131072 parts" in refusal(part(START, within))
    ids = thinker_pb2.DetokenizeRequest(token_ids=[150_000] * 1_000_000).SerializeToString()
    assert refusal(ids, thinker_pb2.DetokenizeRequest) == ""
    assert "1048576 numbers" in refusal(
        part(thinker_pb2.DetokenizeRequest.DESCRIPTOR.fields[0], b"\1" * 2 * MIB), thinker_pb2.DetokenizeRequest
    )
    unpacked = b"\x08\x01" * 1_000_000
    assert "more than 131072 parts" in refusal(unpacked, thinker_pb2.DetokenizeRequest)
    unknown = b"\xf8\x7f\x01" * 1_000_000
    assert "more than 131072 parts" in refusal(unknown)


@pytest.mark.parametrize("message", [GENERATE, RESPONSE])
def test_what_is_no_message_is_refused_whatever_its_length(message: type):
    whole = GENERATE(start={"request_id": "x" * 100_000}).SerializeToString()
    for data in (
        b"\xff" * 50,
        b"\xff" * 100_000,
        whole[:-1],
        whole + b"\x0a\xff",
        b"\x0b" * 100_000,
        b"\x0a" + b"\xff" * 70_000,
    ):
        assert refusal(data, message), data[:20]


def test_what_the_guard_lets_through_costs_little_memory():
    """In a process of its own, whose largest size is only these messages'."""
    code = (
        "import resource, sys; from tests.hostile.test_services import *; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "refusal(part(START, part(MESSAGES, b'') * 7_000_000)); refusal(part(START, part(MESSAGES, b'') * 130_000)); "
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 96, resource.getrusage(resource.RUSAGE_CHILDREN)
