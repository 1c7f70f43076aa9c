"""Qwen3-TTS (12 Hz): a dense talker that reads text, a code predictor, and a codec of its own, which also encodes."""

FOLDER = "speech_tokenizer"  # the codec's, in a checkpoint
