"""What reads calls and thoughts in the answers of a checkpoint: as the settings say, else as it is written itself."""

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from services.thinker.config import ThinkerSettings
from services.thinker.family import ThinkerCheckpoint
from services.thinker.reasoning import find_markers
from services.thinker.tools import find_parser

if TYPE_CHECKING:
    from vllm.tool_parsers import ToolParser

log = structlog.get_logger()


def choose(
    settings: ThinkerSettings, checkpoint: ThinkerCheckpoint
) -> "tuple[ThinkerCheckpoint, type[ToolParser] | None]":
    """The checkpoint with the markers of thoughts, and the parser of calls, if they are not `tool_calls` of it.

    Raises ValueError: a parser that is set is not there, or not for the model.
    """
    if settings.reasoning_parser:
        checkpoint = replace(checkpoint, reasoning=find_markers(settings.reasoning_parser, checkpoint.tokenizer))
    name = settings.tool_call_parser or checkpoint.tool_parser
    try:
        return checkpoint, find_parser(name, checkpoint.tokenizer) if name else None
    except ValueError as error:
        if settings.tool_call_parser:
            raise
        log.warning("tools are refused: the parser that the chat template suggests is not for it", error=str(error))
        return checkpoint, None
