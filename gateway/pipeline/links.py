"""Streams that the start messages of a request name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quartet.v1 import code2wav_pb2, server_info_pb2, stream_pb2


@dataclass(frozen=True)
class Source:
    """A stage that another stage reads from, and the stream between them."""

    kind: str
    start: Any
    stream: stream_pb2.StreamSource


@dataclass(frozen=True)
class Links:
    """Neighbours of a stage in one request.

    Attributes:
        sources: in the order of the pipeline file.
        stream_ids: streams that it opens, one for each reader.
        info: of its own replica.
    """

    sources: Sequence[Source] = ()
    stream_ids: Sequence[str] = ()
    info: server_info_pb2.GetServerInfoResponse | None = None


def link_in_line(start: Any, links: Links) -> None:
    """Links a stage with at most one source and one reader. Raises NotImplementedError: there are more."""
    most_readers = int("output_stream_id" in start.DESCRIPTOR.fields_by_name)
    if len(links.sources) > 1 or len(links.stream_ids) > most_readers:
        neighbours = f"{len(links.sources)} sources and {len(links.stream_ids)} readers"
        raise NotImplementedError(f"a {type(start).__name__} cannot name {neighbours}")
    for source in links.sources:
        start.source.CopyFrom(source.stream)
    for stream_id in links.stream_ids:
        start.output_stream_id = stream_id


def link_decoder(start: code2wav_pb2.DecodeRequest, links: Links) -> None:
    """A code2wav gets the talker's seed, and its voice if it has voices of its own."""
    link_in_line(start, links)
    for source in links.sources:
        start.seed = source.start.sampling.seed % 2**64  # the talker's has a sign
        if links.info and links.info.code2wav.voices:
            start.voice = source.start.speaker
