"""The stage that says when each word of a text is spoken in a sound."""
