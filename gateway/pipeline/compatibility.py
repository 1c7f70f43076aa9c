"""Which replicas of a stage are the same: answers must not depend on who was chosen."""

import time
from collections.abc import Sequence

from gateway.pipeline.replica import Replica
from quartet.v1 import server_info_pb2

# A replica that is down says for so long what the others have to be: it may only be restarting.
HOLD_S = 30.0

Identity = tuple[str, str]  # model, digest of its config


def identity(info: server_info_pb2.GetServerInfoResponse) -> Identity:
    """What all replicas of a stage must have in common."""
    return info.model, info.config_digest


def mark_incompatible(replicas: Sequence[Replica], before: Identity | None, source: Replica | None) -> Identity | None:
    """Sets each replica's `refusal`, and returns the identity that the stage has from now on.

    Args:
        replicas: all of the stage.
        before: its identity until now. It stays as long as a replica has it that serves or has only just gone; then it
            becomes that of the most replicas. So a stage whose replicas are replaced one by one by those of another
            model changes over as a whole, when the last of the old ones has left.
        source: a replica of the stage that it reads from, whose checkpoint it must have; None if that does not matter
            or is not known.
    """
    fitting = []
    for replica in replicas:
        replica.refusal = _misfit(replica, source)
        if replica.info is not None and replica.refusal is None and _counts(replica):
            fitting.append(replica)
    identities = [identity(replica.info) for replica in fitting if replica.info]
    if before not in identities:
        healthy = [identity(replica.info) for replica in fitting if replica.healthy and replica.info]
        before = max(healthy, key=healthy.count) if healthy else before
    for replica in replicas:
        if replica.info is not None and replica.refusal is None and identity(replica.info) != before and before:
            replica.refusal = _difference(identity(replica.info), before)
    return before


def _counts(replica: Replica) -> bool:
    return replica.down_since is None or time.monotonic() - replica.down_since < HOLD_S


def _misfit(replica: Replica, source: Replica | None) -> str | None:
    if source is None or source.info is None or replica.info is None:
        return None
    ours, theirs = replica.info.checkpoint_digest, source.info.checkpoint_digest
    if not ours or not theirs or ours == theirs:
        return None
    return (
        f"refused: it serves another checkpoint (config {ours}) than stage {source.stage}, which it reads from "
        f"(config {theirs}); start both with one model"
    )


def _difference(theirs: Identity, ours: Identity) -> str:
    if theirs[0] != ours[0]:
        what = f"it serves the model {theirs[0]!r}, the stage's other replicas {ours[0]!r}"
    else:
        what = (
            f"its config digest is {theirs[1] or 'missing'}, that of the stage's other replicas {ours[1] or 'missing'}"
        )
    return f"refused: {what}; start all replicas of a stage with one checkpoint and the same settings"
