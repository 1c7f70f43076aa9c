"""The session's items, and the prompt made of them."""
