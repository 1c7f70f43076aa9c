"""Members of requests that clients send by habit, and that change no answer. They are dropped; the response names them.

docs/api.md has the same table.
"""

# What programs write on every message and tool for another server's sake.
CACHING = ("cache_control", "prompt_cache_breakpoint")
# What a client that has one form for all messages writes as null, or empty, where it does not belong.
OF_OTHER_MESSAGES = (
    *("annotations", "audio", "function_call", "images", "reasoning", "reasoning_content", "refusal", "tool_call_id"),
    "tool_calls",
)

# Names a medium, as its part does: within it the name is not read.
MEDIA = ("uuid",)
# What vLLM's clients write null, or empty, where nothing comes from another engine.
OF_VLLM = ("cache_salt", "ec_transfer_params", "prompt_embeds")
# What LMDeploy's client always writes, null or empty.
OF_LMDEPLOY = ("kwargs", "min_new_tokens")

# Of vLLM's clients: which requests belong together, and how many tokens a chunk has.
_VLLM = ("session_id", "stream_interval")
CHATS = (
    *_VLLM,
    *("user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("prompt_cache_options", "safety_identifier", "prediction", "reasoning_effort", "verbosity"),
    *("reasoning", "usage"),  # OpenRouter's
    "return_stage_metrics",  # vLLM-Omni's: the last chunk has quartet.timings anyhow
)
RESPONSES = (
    *("access_programs", "background_options", "client_metadata", "context_management", "image", "moderation"),
    *("prompt_cache_options", "prompt_cache_retention"),
)
COMPLETIONS = (*_VLLM, "user")
SPEECH = (
    *("stream", "ignore_eos", "user"),
    "backend",  # LibreChat's
    *("lang_code", "return_download_link"),  # of Kokoro's clients
)
TRANSCRIPTIONS = (
    "include",
    "temperature_inc",  # of whisper.cpp's clients
    "vad_filter",  # of speaches' clients
)
EMBEDDINGS = ("user",)
DIFFUSION = ("user",)
IMAGES = ("safety_identifier", "style")
