"""BAGEL: one transformer reads texts and pictures, and makes pictures. A pipeline of the dit and the encoder.

The model is arXiv:2505.14683; checkpoints have the files of ByteDance-Seed/BAGEL-7B-MoT. What a request says (texts,
pictures) is read once, into the keys and values that each denoising step looks at: the model's context.
"""
