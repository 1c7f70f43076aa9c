"""The model families that are made of stages: one folder each, and one row each in `services.registry`.

A folder has a module for each part that the family has: `thinker`, `talker`, `code2wav` (what the stage of that name
asks of a family: its `family.py`), `tiny` (small random checkpoints: its `ARCHS` has by name what writes one into a
folder, of a size) and `budget` (what a checkpoint needs of a GPU). A part that a family lacks has no module. Where some
checkpoints of a family lack talker and code2wav, its package says which, by a function `has_speech(config)`. Modules
are imported when they are asked for, so that a stage imports no other stage's libraries.
`services/diffusion/families.py` is the table of diffusion pipelines.
"""

from services.registry import Family as Family  # packages of somebody else may import it from here
