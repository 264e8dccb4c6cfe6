"""A small language model trained in float32 and in FP8: the demo, and its parts for experiments."""

from qtoolkit.demo._demo import Results, parameters, restore, run
from qtoolkit.demo._language_model import (
    CONTEXT,
    Block,
    ByteTransformer,
    Corpus,
    TrainingPair,
    TrainingRun,
    bits_per_byte,
    evaluate,
    load_corpus,
    train_pair,
    validation_windows,
    with_astype,
)

__all__ = [
    "CONTEXT",
    "Block",
    "ByteTransformer",
    "Corpus",
    "Results",
    "TrainingPair",
    "TrainingRun",
    "bits_per_byte",
    "evaluate",
    "load_corpus",
    "parameters",
    "restore",
    "run",
    "train_pair",
    "validation_windows",
    "with_astype",
]
