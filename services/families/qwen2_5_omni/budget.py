"""GPU memory of a checkpoint."""

from functools import partial

from services.sizes import omni_sizes

PREFIXES = {"thinker": "thinker.", "talker": "talker.", "code2wav": "token2wav."}
sizes = partial(omni_sizes, prefixes=PREFIXES)
