"""The user's audio: buffer, turns and transcripts."""
