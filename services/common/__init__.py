"""The shell every stage shares: settings, server, health, drain, tensor streams, errors, logs, metrics, traces."""

import os

# gRPC's library, which reads this when it is imported, writes lines of its own format: one for each peer that speaks no
# TLS where it should.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Its handlers of fork() crash the child now and then if a call is under way. Who forks here makes no calls in the child,
# or execs; and grpc.aio cannot be used in one anyway.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
