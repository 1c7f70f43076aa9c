"""What engines share: devices, captured graphs, staging copies, checkpoints. Knows no gRPC."""
