"""Transcription of speech, window by window."""
