"""ONNX files on onnxruntime, an optional dependency."""

import importlib
from pathlib import Path
from typing import Any


class ModelFileError(Exception):
    """The text says why, and what to do."""


def load(file: Path, what: str) -> Any:
    """An `onnxruntime.InferenceSession` with one thread. `what`: the expected model, for errors.

    Raises:
        ModelFileError: onnxruntime is not installed, or the file is missing or no model.
    """
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        reason = f"{file} needs onnxruntime, which is not installed: pip install 'quartet[onnx]', or leave the file out"
        raise ModelFileError(reason) from None
    if not file.is_file():
        raise ModelFileError(f"{file} is no file; it should be {what}")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        return runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own have no common base
        raise ModelFileError(f"{file} is no model that onnxruntime can run: {error}") from error
