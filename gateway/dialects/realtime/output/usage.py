"""A response's usage in tokens."""

from typing import Any

from gateway.answers.answer import Answer
from gateway.answers.answer import usage as chat_usage
from gateway.media.encode import BYTES_PER_SAMPLE
from quartet.v1 import server_info_pb2


def usage(answer: Answer, code2wav: server_info_pb2.Code2WavInfo | None) -> dict[str, Any]:
    """Tokens by kind. A codec frame counts as an audio token; an answer that was cut short counts the frames that
    arrived."""
    total = chat_usage([answer])
    read, written = total["prompt_tokens_details"], total["completion_tokens_details"]
    per_frame = code2wav.samples_per_frame if code2wav else 0
    arrived = answer.audio_bytes // BYTES_PER_SAMPLE // per_frame if per_frame else 0
    audio, text = written["audio_tokens"] or arrived, written["text_tokens"]
    return {
        "input_tokens": total["prompt_tokens"],
        "input_token_details": {
            "text_tokens": read["text_tokens"],
            "audio_tokens": read["audio_tokens"],
            "image_tokens": read["image_tokens"],
            "cached_tokens": read["cached_tokens"],
        },
        "output_tokens": text + audio,
        "output_token_details": {"text_tokens": text, "audio_tokens": audio},
        "total_tokens": total["prompt_tokens"] + text + audio,
    }
