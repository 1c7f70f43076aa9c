"""Other people's implementations of the same models: what Quartet's answers must equal."""
