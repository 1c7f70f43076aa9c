"""WebRTC for realtime sessions: a process of its own, which is a client of the gateway's WebSocket for each call."""
