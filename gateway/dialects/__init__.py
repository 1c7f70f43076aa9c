"""The APIs that clients speak: each parses its requests and renders its responses, and imports no other."""
