"""The shell every stage shares: settings, server, health, drain, tensor streams, errors, logs, metrics, traces."""

import os

# gRPC's library, which reads this when it is imported, writes lines of its own format: one for each peer that speaks no
# TLS where it should.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Its handlers of fork() crash the child now and then if a call is under way. They are for children with calls of their
# own, which grpc.aio cannot have.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
