"""Tensor streams between stages: producer, consumer, and what carries tensors beside gRPC. Knows no stage."""
