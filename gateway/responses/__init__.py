"""OpenAI's Responses: items in, items out, kept here for the next turn."""
