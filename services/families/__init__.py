"""The model families that are made of stages: one folder each, and one row each in `services.registry`.

A folder has a module for each part of the family: `thinker`, `talker`, `code2wav` (see that stage's `family.py`),
`tiny` (small random checkpoints, written by its `ARCHS`) and `budget` (what a checkpoint needs of a GPU). A family of
the diffusion stages has `pipeline` and a row in `services.diffusion.families` instead of the first three. A package
whose checkpoints may lack talker and code2wav has a function `has_speech(config)`. Modules are imported when needed,
so that a stage imports no other stage's libraries.
"""

from services.registry import Family as Family  # packages of somebody else may import it from here
