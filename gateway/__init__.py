"""OpenAI-compatible HTTP API over the stages. Free of torch and model code."""

import services.common  # noqa: F401  before anything imports grpc
