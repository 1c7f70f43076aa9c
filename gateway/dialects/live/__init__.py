"""OpenAI's Live API."""
