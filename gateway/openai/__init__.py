"""The OpenAI API: requests in, pipeline jobs out, and back."""
