"""Holds a call by grpcurl to the contract, without grpcurl."""

import importlib
import json
from collections.abc import Sequence

from google.protobuf import descriptor_pool, json_format, message_factory

for _file in ("code2wav", "dit", "profile", "server_info", "talker", "thinker"):
    importlib.import_module(f"quartet.v1.{_file}_pb2")  # its messages and services are in the pool then
FLAGS_WITH_VALUE = ("-d", "-cacert", "-cert", "-key", "-servername")


def arguments(words: Sequence[str]) -> list[str]:
    """What is no flag: the address, then a method or `list`."""
    return [
        word
        for before, word in zip(("", *words), words, strict=False)
        if before not in FLAGS_WITH_VALUE and word[0] != "-"
    ]


def check_call(words: Sequence[str], stdin: str = "") -> None:
    """Raises if the last word is no method that has a service of ours, or its requests are not what that takes.

    Args:
        words: of the command, behind `grpcurl`.
        stdin: what it reads with `-d @`.
    """
    service, _, method = words[-1].partition("/")
    found = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(method)
    data = words[words.index("-d") + 1] if "-d" in words else "{}"
    requests, rest = [], (stdin if data == "@" else data).strip()
    while rest:
        request, end = json.JSONDecoder().raw_decode(rest)
        json_format.ParseDict(request, message_factory.GetMessageClass(found.input_type)())
        requests.append(request)
        rest = rest[end:].lstrip()
    assert ("start" in requests[0]) == found.client_streaming
    assert len(requests) == 1 or found.client_streaming
