"""Tensors between processes of one host, through memory that both map: no copy but the one into it."""
