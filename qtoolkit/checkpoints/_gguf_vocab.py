"""The tokenizer of a folder, as llama.cpp stores it.

Two kinds are read without their programs: SentencePiece's tokenizer.model, a protocol buffer, and
tokenizer.json with byte-level BPE. llama.cpp has the regular expressions that split text in its own
code, and a file names one of them (`tokenizer.ggml.pre`).
Source: github.com/ggml-org/llama.cpp, conversion/base.py, get_vocab_base and
_create_vocab_sentencepiece; google/sentencepiece, sentencepiece_model.proto.
"""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path as LocalPath
from typing import Any

from qtoolkit.checkpoints._tensors import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# The names that llama.cpp has for the regular expressions of tokenizer.json.
_SPLITS = {
    rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
}


def write_vocabulary(writer: Any, path: str, size: int, is_gemma: bool) -> None:
    """Writes the tokenizer of a folder for a model with `size` embeddings."""
    try:
        _write(writer, path, size, is_gemma)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        raise CheckpointError(
            f"{path}: its tokenizer: {type(error).__name__}: {error}; fetch tokenizer.json, "
            "tokenizer.model and tokenizer_config.json again"
        ) from error


def _write(writer: Any, path: str, size: int, is_gemma: bool) -> None:
    import gguf

    config = _json(os.path.join(path, "tokenizer_config.json"))
    model = os.path.join(path, "tokenizer.model")
    is_pieces = os.path.isfile(model)
    if not is_pieces and is_gemma:
        raise CheckpointError(
            f"{path}: no tokenizer.model, which llama.cpp reads of Gemma; fetch it again"
        )
    if is_pieces:
        tokens, scores, types = _pieces(model, size, config)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
    else:
        data = _json(os.path.join(path, "tokenizer.json"))
        names, types, pre = _byte_pairs(path, data, size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(names)
        writer.add_token_types(types)
    special = gguf.SpecialVocab(LocalPath(path), load_merges=not is_pieces, n_vocab=size)
    if is_pieces and "eot" not in special.special_token_ids and b"<end_of_turn>" in tokens:
        special.special_token_ids["eot"] = tokens.index(b"<end_of_turn>")  # of the first Gemma
    special.add_to_gguf(writer, quiet=True)
    prefix = False if is_gemma else config.get("add_prefix_space")
    if isinstance(prefix, bool):
        writer.add_add_space_prefix(prefix)


def _byte_pairs(path: str, data: dict[str, Any], size: int) -> tuple[list[str], list[int], str]:
    """Tokens, their types, and llama.cpp's name of the regular expression."""
    model = data.get("model") or {}
    if model.get("type") != "BPE" or not model.get("vocab"):
        raise CheckpointError(
            f"{path}: no tokenizer.model, and tokenizer.json has {model.get('type')}, expected "
            "SentencePiece or byte-level BPE; convert the model with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    names = {index: name for name, index in model["vocab"].items()}
    types = dict.fromkeys(names, _NORMAL)
    for token in data.get("added_tokens") or ():
        name, index = token["content"], token["id"]
        is_control = token.get("special") or _looks_special(name)
        names[index] = name if is_control else name.replace("\u2581", " ")
        types[index] = _CONTROL if is_control else _USER
    if max(names) >= size:
        raise CheckpointError(
            f"{path}: token {max(names)} in tokenizer.json, expected less than the {size} "
            "embeddings of the model; fetch the folder again"
        )
    tokens = [names.get(index, f"[PAD{index}]") for index in range(size)]
    return tokens, [types.get(index, _UNUSED) for index in range(size)], _split(path, data)


def _split(path: str, data: dict[str, Any]) -> str:
    found = data.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers") or [found]
    for step in steps:
        pattern = step.get("pattern") if step.get("type") == "Split" else None
        if isinstance(pattern, dict) and pattern.get("Regex") in _SPLITS:
            return _SPLITS[pattern["Regex"]]
    kinds = [step.get("type") for step in steps]
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    known = ", ".join((*_SPLITS.values(), "smollm", "gpt-2"))
    raise CheckpointError(
        f"{path}: tokenizer.json splits text by {str(found)[:80]}, expected one of the regular "
        f"expressions that llama.cpp calls {known}; convert the model with llama.cpp's "
        "convert_hf_to_gguf.py"
    )


def _looks_special(token: str) -> bool:
    is_known = token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
    ends = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return is_known or any(token.startswith(a) and token.endswith(b) for a, b in ends)


def _pieces(
    file: str, size: int, config: dict[str, Any]
) -> tuple[list[bytes], list[float], list[int]]:
    """Tokens, scores and types of a tokenizer.model; added tokens are those of the config."""
    tokens = [f"[PAD{index}]".encode() for index in range(size)]
    scores, types = [-10000.0] * size, [_UNUSED] * size
    with open(file, "rb") as stream:
        pieces = [_piece(data) for field, data in _fields(stream.read()) if field == 1]
    for index, (text, score, kind) in enumerate(pieces[:size]):
        tokens[index], scores[index] = text, score
        types[index] = _NORMAL if kind == _USER else kind
    added = _json(os.path.join(os.path.dirname(file), "added_tokens.json"))
    for name, index in added.items():
        if index < size:
            tokens[index], scores[index], types[index] = name.encode(), -1000.0, _USER
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        index, name = int(key), token["content"]
        if index >= size:
            continue
        is_control = token.get("special") or _looks_special(name)
        types[index] = _CONTROL if is_control else _USER
        tokens[index] = (name if is_control else name.replace("\u2581", " ")).encode()
        scores[index] = -1000.0
    return tokens, scores, types


def _piece(data: bytes) -> tuple[bytes, float, int]:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return fields.get(1, b""), score, fields.get(3, _NORMAL)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: number, and an integer or bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
            continue
        length = number() if kind == 2 else 8 if kind == 1 else 4
        yield key >> 3, data[at : at + length]
        at += length


def _json(file: str) -> dict[str, Any]:
    """A JSON object from a file; {} if there is none."""
    if not os.path.isfile(file):
        return {}
    with open(file, encoding="utf-8") as stream:
        value = json.load(stream)
    return value if isinstance(value, dict) else {}
