"""The stages of Quartet, each a gRPC service of its own: `python -m services.<stage>`."""

import os

# Read by libgomp when torch is imported, so it stands here. Workers of small operations must not go to sleep between
# two of them, and must not spin for the 10 ms and more of the default either: where other processes want the cores,
# the one that everybody waits for may be the one that has none. 20,000 rounds are about a millisecond.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
