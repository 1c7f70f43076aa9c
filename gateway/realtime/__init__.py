"""`/v1/realtime`: speech to speech over a WebSocket, in the dialect of OpenAI's Realtime API."""
