"""Small checkpoints and adapters, made once on a machine."""
