"""The shell every stage shares: settings, server, health, drain, tensor streams, errors, logs, metrics, traces."""

import os

# gRPC's library, which reads this when it is imported, writes lines of its own format: one for each peer that speaks no
# TLS where it should, and one, as an error, for each that asks for a name which the certificate is not for. What failed
# is in the exception, or in the replica's state, too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Its handlers of fork() crash the child now and then if a call is under way. They are for children with calls of their
# own, which grpc.aio cannot have.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
