"""Speech to text, window by window."""
