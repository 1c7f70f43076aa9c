"""A small aligner: convolutions hear letters and the begins of words, and Viterbi's algorithm places a text's words.

The idea: Kürzinger et al., "CTC-Segmentation of Large Corpora for German End-to-end Speech Recognition", 2020. Theirs
has letters alone; here two more heads say where words begin, and where nobody speaks. `training/aligner.py` trains it.
"""


def only_stages(config: object) -> tuple[str, ...]:
    return ("aligner",)
