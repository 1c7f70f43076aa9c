"""Media of requests: fetching, decoding data URLs, checking headers. Nothing here decodes a whole file."""
