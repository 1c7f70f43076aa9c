"""The HTTP front: an OpenAI-compatible API over the stages. Free of torch, vLLM and model code."""
