"""The HTTP front: an OpenAI-compatible API over the stages. Free of torch, vLLM and model code."""

import services.common  # noqa: F401  before anything imports grpc
