"""What each RPC, and each field whose size a client decides, can be made to cost, and what stops it. Tests are made
from these tables; a test compares them with the descriptors of all services."""

MESSAGE = "message"  # its bytes (gRPC), its parts and numbers, whether it can be read: services/common/rpc/guard.py
START = "start"  # a stream without its first message: services/common/rpc/requests.py
MEDIA = "media"  # bytes that are announced and do not come: the same
TEXT = "text"  # a text without its end: services/talker/session.py
PLACE = "place"  # running and queued requests: services/common/rpc/call.py
OPEN = "open"  # calls that last; of one connection 1,024: services/common/rpc/channels.py
SOURCE = "source"  # a stream of the client's own: services/common/stream/consumer.py
CLAIM = "claim"  # a stream that nobody opens: services/common/stream/hub.py

# "SERVICE/METHOD": its costs.
RPCS: dict[str, tuple[str, ...]] = {
    "quartet.v1.ThinkerService/Generate": (MESSAGE, START, MEDIA, PLACE),
    "quartet.v1.ThinkerService/StreamDeltas": (MESSAGE, OPEN),
    "quartet.v1.ThinkerService/LoadLora": (MESSAGE, PLACE),
    "quartet.v1.ThinkerService/Tokenize": (MESSAGE, PLACE),
    "quartet.v1.ThinkerService/Detokenize": (MESSAGE, PLACE),
    "quartet.v1.ThinkerService/DescribeTokenizer": (MESSAGE, PLACE),
    "quartet.v1.ThinkerService/UnloadLora": (MESSAGE, PLACE),
    "quartet.v1.TalkerService/Speak": (MESSAGE, START, TEXT, PLACE, SOURCE),
    "quartet.v1.Code2WavService/Decode": (MESSAGE, PLACE, SOURCE),
    "quartet.v1.DitService/Generate": (MESSAGE, START, MEDIA, PLACE, SOURCE),
    "quartet.v1.EncoderService/Encode": (MESSAGE, START, MEDIA, PLACE),
    "quartet.v1.EmbedderService/Embed": (MESSAGE, PLACE),
    "quartet.v1.EmbedderService/Score": (MESSAGE, PLACE),
    "quartet.v1.AlignerService/Align": (MESSAGE, PLACE),
    "quartet.v1.TensorStreamService/Subscribe": (MESSAGE, CLAIM, OPEN),
    "quartet.v1.ServerInfoService/GetServerInfo": (MESSAGE,),
    "quartet.v1.ServerInfoService/GetLoad": (MESSAGE,),
    "quartet.v1.ProfileService/StartProfile": (MESSAGE,),
    "quartet.v1.ProfileService/StopProfile": (MESSAGE,),
    "quartet.v1.ProfileService/GetSpans": (MESSAGE,),
    "grpc.health.v1.Health/Check": (MESSAGE,),
    "grpc.health.v1.Health/List": (MESSAGE,),
    "grpc.health.v1.Health/Watch": (MESSAGE, OPEN),
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (MESSAGE, OPEN),
}

ID = "256 characters"
NAME = "compared with the names that there are"
PARTS = "parts of the message"
JSON = "read as JSON, one level deep into an error"
CONTEXT = "the context, by its length before it is read"
BYTES = "bytes of the message"
SMALL = "4 KiB for the message"
OF_PRODUCER = "checked as they come: services/talker/answer.py, services/code2wav/servicer.py"

# Fields whose size the client decides, by message: what limits them.
FIELDS: dict[str, dict[str, str]] = {
    "quartet.v1.DecodeRequest": {"request_id": ID, "voice": NAME},
    "quartet.v1.Transcription": {"language": NAME, "to_language": NAME, "hints": "4,096 characters"},
    "quartet.v1.StreamSource": {"address": "a name that is looked up", "stream_id": ID, "server_name": NAME},
    "quartet.v1.Tensor": {"shape": "8 dimensions, whose product is the payload's", "inline": BYTES},
    "quartet.v1.SharedMemory": {"arena": "a pattern, never a path"},
    "quartet.v1.Rows": {"name": NAME},
    "quartet.v1.StreamChunk": {"rows": OF_PRODUCER},
    "quartet.v1.DitStart": {
        "request_id": ID,
        "prompt": "65,536 characters, max_prompt_tokens",
        "negative_prompt": "65,536 characters, max_prompt_tokens",
        "images": "max_images",
        "context": "256 parts, of which each picture is one of images",
        "control_images": "control_images, which the model has",
        "loras": "those that there are, none twice",
        "arguments": "65,536 characters, those that the pipeline has",
    },
    "quartet.v1.ContextPart": {"text": "65,536 characters and max_prompt_tokens, with the prompt"},
    "quartet.v1.LoraWeight": {"name": NAME},
    "quartet.v1.Media": {"data": BYTES, "field": "cut in the error that names it"},
    "quartet.v1.MediaChunk": {"data": "the size that was announced, at most max_media_bytes"},
    "quartet.v1.EncodeStart": {"output_stream_id": ID},
    "quartet.v1.GetSpansRequest": {"request_id": "compared with 1,000 ids"},
    "quartet.v1.Subscription": {"stream_id": ID, "request_id": ID, "rows": NAME},
    "quartet.v1.RowSelection": {"name": NAME},
    "quartet.v1.ConsumerCapabilities": {"transports": PARTS},
    "quartet.v1.SharedMemoryHost": {"boot_id": "compared with one"},
    "quartet.v1.UcxInbox": {"worker_address": "64 KiB"},
    "quartet.v1.Credit": {"released": "leases that the stream holds"},
    "quartet.v1.SpeakStart": {"request_id": ID, "speaker": NAME, "output_stream_id": ID},
    "quartet.v1.SpeakRequest": {"text": "positions of the talker"},
    "quartet.v1.InlineThinkerOutput": {"rows": OF_PRODUCER},
    "quartet.v1.SpokenText": {
        "text": "positions of the talker",
        "instructions": "16,384 characters",
        "language": NAME,
    },
    "quartet.v1.VoiceSample": {"text": "16,384 characters"},
    "quartet.v1.GenerateStart": {
        "request_id": ID,
        "messages": PARTS,
        "output_stream_id": ID,
        "tools": PARTS,
        "chat_template_kwargs_json": JSON,
        "lora": NAME,
    },
    "quartet.v1.ChatMessage": {
        "role": NAME,
        "content": PARTS,
        "tool_calls": PARTS,
        "tool_call_id": CONTEXT,
        "name": CONTEXT,
        "token_ids": CONTEXT,
        "reasoning": CONTEXT,
    },
    "quartet.v1.ContentPart": {"text": CONTEXT},
    "quartet.v1.ToolCall": {"id": CONTEXT, "name": CONTEXT, "arguments_json": JSON},
    "quartet.v1.SamplingParameters": {
        "stop": "16 of them",
        "stop_token_ids": "120",
        "logit_bias": "1,024",
        "json_schema": "256 KiB, 5 s and 2 GiB to compile",
        "regex": "256 KiB, 5 s and 2 GiB to compile",
        "grammar": "256 KiB, 5 s and 2 GiB to compile",
        "structural_tag": "256 KiB, 5 s and 2 GiB to compile",
        "allowed_token_ids": "1,024",
        "bad_words": "64 of 448 bytes together",
        "logprob_token_ids": "128",
        "prompt_logprob_token_ids": "a row for each token of the prompt",
    },
    "quartet.v1.PromptRow": {"ids": "20"},
    "quartet.v1.TextChoice": {"texts": "256 KiB of them"},
    "quartet.v1.Tool": {"name": CONTEXT, "description": CONTEXT, "parameters_json": "1 MiB of all tools"},
    "quartet.v1.ToolChoice": {"name": NAME},
    "quartet.v1.RawPrompt": {"text": CONTEXT, "media": "max_images, max_audios, max_videos"},
    "quartet.v1.TokenIds": {"ids": CONTEXT},
    "quartet.v1.DeltaDestination": {"stream_id": NAME},
    "quartet.v1.StreamDeltasRequest": {"stream_id": ID},
    "quartet.v1.LoadLoraRequest": {"name": "a pattern of 128 characters", "path": "within --lora-root"},
    "quartet.v1.UnloadLoraRequest": {"name": NAME},
    "quartet.v1.TokenizeRequest": {
        "text": BYTES,
        "messages": PARTS,
        "tools": PARTS,
        "chat_template_kwargs_json": JSON,
    },
    "quartet.v1.DetokenizeRequest": {"token_ids": "1,048,576 numbers"},
    "quartet.v1.EmbedRequest": {"request_id": ID, "inputs": "max_inputs, max_request_tokens"},
    "quartet.v1.AlignRequest": {
        "request_id": ID,
        "pcm16": "max_audio_s",
        "text": "32 characters for each of max_words, and max_words",
        "language": NAME,
    },
    "quartet.v1.EmbedInput": {"text": "max_request_characters"},
    "quartet.v1.ScoreRequest": {
        "request_id": ID,
        "queries": "as many as the documents, max_request_characters",
        "documents": "max_inputs, max_request_characters",
    },
    "grpc.health.v1.HealthCheckRequest": {"service": SMALL},
    "grpc.reflection.v1alpha.ServerReflectionRequest": {
        "host": SMALL,
        "file_by_filename": SMALL,
        "file_containing_symbol": SMALL,
        "all_extension_numbers_of_type": SMALL,
        "list_services": SMALL,
    },
    "grpc.reflection.v1alpha.ExtensionRequest": {"containing_type": SMALL},
}
