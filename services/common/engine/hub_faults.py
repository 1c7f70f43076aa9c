"""Why a model cannot be had from the hub, for people. Imports the hub's client only after a failure."""

import os


def hub_fault(error: BaseException) -> str:
    """The meaning of an `error` of the hub's client, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "it is gated: accept its terms on its page at the hub, then give your token by HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or it is private: check the name, or give your token by HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has the model, but no such revision: name a commit, a branch or a tag of it"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return "the hub has it, but not as a checkpoint: a file that says what it is (config.json) is not there"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)) or "onnect" in str(error):
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            return "it is not here, and HF_HUB_OFFLINE keeps it from being fetched: unset that, or give a directory"
        at = f" at {endpoint}" if (endpoint := os.environ.get("HF_ENDPOINT")) else ""
        return f"the hub{at} cannot be reached: check the network (HF_ENDPOINT, HTTPS_PROXY), or give a directory"
    return " ".join(str(error).split()) or type(error).__name__
