"""What other people's programs send at their defaults, by their sources.

docs/chat-clients.md says what to type into them.
"""

import base64
from pathlib import Path
from typing import Any

from tests.support.clients.pictures import png

QUESTION = (Path(__file__).parents[3] / "cli" / "assets" / "question.wav").read_bytes()
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SPEECH, HEARING, TRANSLATING = "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"
DRAWING, EDITING = "/v1/images/generations", "/v1/images/edits"
SOUND = {"file": ("question.wav", QUESTION, "audio/wav")}
HEARD = {"data": base64.b64encode(QUESTION).decode(), "format": "wav"}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Light, please."}]
CALL = {"id": "c1", "type": "function", "function": {"name": "lamp", "arguments": '{"on":true}'}}
PARAMETERS = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
LAMP = {"type": "function", "function": {"name": "lamp", "description": "Switches.", "parameters": PARAMETERS}}
CALLED = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
CALLED += [{"role": "tool", "tool_call_id": "c1", "content": "done"}]
CACHED = {"cache_control": {"type": "ephemeral"}}
SEEN = f"data:image/png;base64,{base64.b64encode(png()).decode()}"

Request = tuple[str, dict[str, Any]]  # a path, and what httpx sends there

# By the name in the documents. Files are those of the packages or repositories.
REQUESTS: dict[str, list[Request]] = {
    # open-webui 0.12.4: open_webui/routers/openai.py:1407, audio/__init__.py:437 and :897, images.py:602 and :902
    "Open WebUI": [
        (CHAT, {"json": {"model": "scripted", "stream": True, "messages": CALLED, "tools": [LAMP]}}),
        (SPEECH, {"json": {"input": "Yes.", "voice": "alloy", "model": "tts-1"}}),
        (HEARING, {"data": {"model": "", "language": "en"}, "files": SOUND}),
        (HEARING, {"json": {"model": "", "input_audio": HEARD}}),
        (DRAWING, {"json": {"model": "dall-e-2", "prompt": "a cat", "n": 1, "size": "512x512"}}),
        (
            EDITING,
            {
                "data": {"model": "", "prompt": "blue", "n": "1", "response_format": "b64_json"},
                "files": {"image[]": ("a.png", png(), "image/png")},
            },
        ),
    ],
    # @n8n/n8n-nodes-langchain 2.41.1: dist/nodes/vendors/OpenAi/v2/actions. Its chat model is LangChain.js's.
    "n8n": [
        (
            RESPONSES,  # text/helpers/responses.js; the call comes back as it was answered
            {
                "json": {
                    "model": "scripted",
                    "input": [
                        {"role": "user", "content": [{"type": "input_text", "text": "Light, please."}]},
                        {"role": "assistant", "content": [{"type": "output_text", "text": "No.", "annotations": []}]},
                        {
                            "type": "function_call",
                            "id": "fc_1",
                            "status": "completed",
                            "call_id": "c1",
                            "name": "lamp",
                            "arguments": "{}",
                        },
                        {"type": "function_call_output", "call_id": "c1", "output": "done"},
                    ],
                    "parallel_tool_calls": True,
                    "store": True,
                    "background": False,
                    "tools": [{"type": "function", "name": "lamp", "parameters": PARAMETERS, "strict": False}],
                }
            },
        ),
        (
            RESPONSES,  # image/analyze.operation.js
            {
                "json": {
                    "model": "scripted",
                    "input": [
                        {
                            "role": "user",
                            "content": [
                                {"type": "input_text", "text": "What's in this image?"},
                                {"type": "input_image", "detail": "auto", "image_url": SEEN},
                            ],
                        }
                    ],
                    "max_output_tokens": 300,
                }
            },
        ),
        (
            SPEECH,
            {"json": {"model": "tts-1", "input": "Yes.", "voice": "alloy", "response_format": "mp3", "speed": 1}},
        ),
        (HEARING, {"data": {"model": "whisper-1"}, "files": SOUND}),
        (TRANSLATING, {"data": {"model": "whisper-1"}, "files": SOUND}),
        (DRAWING, {"json": {"prompt": "a cat", "model": "gpt-image-1-mini"}}),
        (DRAWING, {"json": {"prompt": "a cat", "model": "dall-e-3", "response_format": "b64_json"}}),
        (
            EDITING,
            {
                "data": {
                    "prompt": "blue",
                    "model": "gpt-image-1",
                    "n": "1",
                    "size": "1024x1024",
                    "quality": "auto",
                    "output_format": "png",
                    "output_compression": "100",
                },
                "files": {"image[]": ("a.png", png(), "image/png")},
            },
        ),
    ],
    # api/server/services/Files/Audio. Its chats are LangChain.js's (@librechat/agents 3.2.21).
    "LibreChat": [
        (SPEECH, {"json": {"input": "Yes.", "model": "tts-1", "voice": "alloy", "backend": "openai"}}),
        (HEARING, {"data": {"model": "whisper-1", "language": "en"}, "files": SOUND}),
    ],
    # server/utils: AiProviders/genericOpenAi, TextToSpeech/openAiGeneric, SpeechToText/openAiGeneric
    "AnythingLLM": [
        (
            CHAT,
            {
                "json": {
                    "model": "scripted",
                    "stream": True,
                    "messages": MESSAGES,
                    "temperature": 0.7,
                    "max_tokens": 1024,
                }
            },
        ),
        (SPEECH, {"json": {"model": "tts-1", "voice": "alloy", "input": "Yes."}}),
        (HEARING, {"data": {"model": "whisper-1"}, "files": {"file": ("audio.webm", QUESTION)}}),
    ],
    # src/api/providers/openai.ts of both
    "Cline, Roo Code": [
        (
            CHAT,
            {
                "json": {
                    "model": "scripted",
                    "temperature": 0,
                    "messages": [
                        {"role": "system", "content": [{"type": "text", "text": "Be brief.", **CACHED}]},
                        {"role": "user", "content": [{"type": "text", "text": "Light, please.", **CACHED}]},
                    ],
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "tools": [LAMP],
                    "tool_choice": "auto",
                    "parallel_tool_calls": False,
                    "max_tokens": 8192,
                }
            },
        )
    ],
    # dify_plugin 0.7.4: interfaces/model/openai_compatible/llm.py:188 and :445, tts.py:66, speech2text.py:40
    "Dify": [
        (CHAT, {"json": {"model": "scripted", "max_tokens": 5, "messages": [{"role": "user", "content": "ping"}]}}),
        (
            CHAT,
            {
                "json": {
                    "model": "scripted",
                    "stream": True,
                    "temperature": 0.7,
                    "messages": CALLED,
                    "tool_choice": "auto",
                    "tools": [LAMP],
                    "user": "u",
                }
            },
        ),
        (SPEECH, {"json": {"model": "tts-1", "input": "Yes.", "voice": "alloy", "response_format": "mp3"}}),
        (HEARING, {"data": {"model": "whisper-1"}, "files": SOUND}),
    ],
    # sillytavern 1.19.0: src/endpoints/backends/chat-completions.js:2652, public/scripts/extensions/tts
    "SillyTavern": [
        (
            CHAT,
            {
                "json": {
                    "messages": [*MESSAGES, {"role": "assistant", "content": "No."}, MESSAGES[1]],
                    "model": "scripted",
                    "temperature": 1,
                    "max_tokens": 300,
                    "stream": False,
                    "presence_penalty": 0,
                    "frequency_penalty": 0,
                    "top_p": 1,
                    "logit_bias": {},
                    "reasoning_effort": "medium",
                }
            },
        ),
        (
            SPEECH,
            {"json": {"input": "Yes.", "voice": "alloy", "response_format": "mp3", "speed": 1, "model": "tts-1"}},
        ),
    ],
}
