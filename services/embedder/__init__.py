"""The stage that makes embeddings of texts, or scores pairs of texts."""
