"""The shell every stage shares: settings, server, health, drain, tensor streams, errors, logs, metrics, traces."""

import os

# gRPC's library, which reads this when it is imported, writes lines of its own format: one for each peer that speaks no
# TLS where it should.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
