"""The files of a request, as its messages bring them."""

from collections.abc import AsyncIterator
from typing import Any

from quartet.v1 import dit_pb2, media_pb2
from services.common.errors import InvalidInput
from services.common.rpc.requests import read_bytes
from services.diffusion.config import PipelineSettings
from services.diffusion.images import MASK_FIELD, Files


async def read_files(start: dit_pb2.DitStart, requests: AsyncIterator[Any], limits: PipelineSettings) -> Files:
    """The request's files; bytes that `start` does not have come from the messages in `requests`.

    Raises:
        InvalidInput: names the field: too large, of another kind, or bytes that do not come.
    """
    media = [(each.field or f"images[{i}]", each) for i, each in enumerate(start.images)]
    if start.HasField("mask"):
        media.append((MASK_FIELD, start.mask))
    size_bytes = 0
    for field, each in media:
        if each.kind != media_pb2.MEDIA_KIND_IMAGE:
            raise InvalidInput(field, "must be of MEDIA_KIND_IMAGE")
        if not each.data and not each.size_bytes:
            raise InvalidInput(field, "is empty")
        size_bytes += len(each.data) or each.size_bytes
        if size_bytes > limits.max_media_bytes:
            raise InvalidInput(
                field, f"makes the pictures larger than the {limits.max_media_bytes} bytes that are taken"
            )
    return [(field, each.data or await read_bytes(field, each.size_bytes, requests)) for field, each in media]
