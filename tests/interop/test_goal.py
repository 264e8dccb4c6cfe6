"""The goal of an inference engineer: a folder as SmolLM2's, converted by one line.

The oracle is transformers itself, which loads the result with nothing said.
"""

import math
import shlex
import time
from pydoc_data.topics import topics

import numpy as np
import torch
import transformers
from command import run

LINE = "qtoolkit convert SmolLM2 SmolLM2-fp8 --layout compressed-tensors"


def windows(part, count, seed):
    at = np.random.default_rng(seed).integers(0, len(part) - 65, count)[:, None]
    return torch.tensor(part[at + np.arange(64)].astype(np.int64))


def perplexity(folder, rows):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return math.exp(model(rows, labels=rows).loss)


def test_transformers_perplexity_of_a_converted_folder(tmp_path, monkeypatch):
    before = time.monotonic()
    monkeypatch.chdir(tmp_path)
    text = np.frombuffer("\n".join(topics[key] for key in sorted(topics)).encode(), np.uint8)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # products this small wait longer for threads than they take
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(  # SmolLM2's shape, small: tied embeddings, grouped heads
            vocab_size=256,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):  # enough that rounding its weights could make it worse
        rows = windows(text[:400_000], 8, step)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("SmolLM2")

    done = run(*shlex.split(LINE)[1:])
    assert done.exit_code == 0, done.output

    unseen = windows(text[400_000:], 32, -1 % 2**32)
    wide, fp8 = perplexity("SmolLM2", unseen), perplexity("SmolLM2-fp8", unseen)
    assert wide < 40  # it has learned something: 256 is a guess
    assert wide != fp8
    assert abs(fp8 / wide - 1) < 0.03
    assert time.monotonic() - before < 600
