"""Tensors by UCX: between hosts, over TCP or RDMA, beside the gRPC stream that announces them."""
