"""Tries pipeline classes of diffusers in the dit, with the tiny checkpoints of diffusers' own tests."""
