"""Files that clients upload, and name in later requests."""
