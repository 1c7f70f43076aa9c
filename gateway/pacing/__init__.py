"""Sound that leaves in real time."""
