"""Each row of the table of cautions, tried with its loader: what it names fails, the rest loads.

Oracle: the logits of the same model with the dequantized weights in bfloat16.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import (
    MergeModulelist,
    WeightConverter,
    _build_checkpoint_conversion_mapping,
)

from qtoolkit import Rules
from qtoolkit.checkpoints import convert, dequantize_checkpoint
from qtoolkit.checkpoints._cautions import CAUTIONS, JOINED

IDS = torch.arange(16).reshape(2, 8)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def mixtral():
    config = transformers.MixtralConfig(num_local_experts=4, **SMALL)
    return transformers.MixtralForCausalLM(config)


def granite_hybrid():
    """Its experts are in one tensor, also in files."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 256}
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
    config = transformers.GraniteMoeHybridConfig(
        layer_types=["attention"] * 2, mamba_expand=2, **SMALL, **sizes, **mamba
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def llama4():
    """Its experts are in one tensor, and loaders of compressed-tensors read them one by one."""
    sizes = {"intermediate_size_mlp": 128, "num_local_experts": 2, "head_dim": 32}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = transformers.Llama4TextConfig(interleave_moe_layer_step=1, **SMALL, **sizes, **tokens)
    return transformers.Llama4ForCausalLM(config)


def llama(hidden, intermediate=256, heads=4):
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    config = transformers.LlamaConfig(**SMALL | sizes)
    return transformers.LlamaForCausalLM(config)


HYBRID = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "attention_head_dim": 64,
    "mamba_d_state": 16,
    "use_mamba_kernels": False,
}


def zamba():
    config = transformers.ZambaConfig(n_mamba_heads=2, attention_hidden_size=256, **SMALL | HYBRID)
    return transformers.ZambaForCausalLM(config)


def zamba2(blocks=1):
    sizes = {"mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 32, "adapter_rank": 128}
    config = transformers.Zamba2Config(
        num_mem_blocks=blocks, use_mem_rope=False, **SMALL | HYBRID | sizes
    )
    return transformers.Zamba2ForCausalLM(config)


@dataclasses.dataclass
class Case:
    """A model and the options of `convert`."""

    make: Callable[[], Any]
    options: dict[str, Any]


PACKED = {"format": "int4_group128"}
BLOCKS = {"layout": "finegrained-fp8"}
# Mamba's matrices are left alone: their code asks packed layers for `weight`.
MAMBA = {"skip": [r"mamba\."]}
# Of each row what fails, and what is close to it and loads.
CASES: dict[str, tuple[list[Case], list[Case]]] = {
    "experts in nvfp4": (
        [Case(mixtral, {"format": "nvfp4"})],
        [
            Case(mixtral, {"format": "mxfp4"}),
            Case(llama4, {"format": "nvfp4"}),
            Case(granite_hybrid, {"format": "nvfp4"}),
        ],
    ),
    "experts in unread formats": (
        [
            Case(mixtral, options)
            for options in ({"scaling": "block"}, {"format": "int8"}, {"format": "mxfp8_e4m3"})
        ],
        [
            Case(mixtral, options)
            for options in ({"scaling": "tensor"}, {"scaling": "channel"}, PACKED)
        ],
    ),
    "experts in several formats": (
        [
            Case(
                mixtral, {"format": Rules({r"\.w2\.": "int8_group128", "experts": "int4_group128"})}
            )
        ],
        [Case(mixtral, {"format": Rules({r"experts": "int4_group128"})})],
    ),
    "unquantized experts beside FP8": (
        [Case(mixtral, {"skip": [r"experts\.3\."]})],
        [Case(mixtral, {"skip": [r"\.w2\."]}), Case(mixtral, {"skip": ["experts"]})],
    ),
    "unquantized experts beside packed codes": (
        [
            Case(mixtral, {**PACKED, "skip": [skip]})
            for skip in (r"experts\.3\.", r"\.w2\.", "experts")
        ],
        [Case(granite_hybrid, PACKED), Case(granite_hybrid, {"format": "mxfp4"})],
    ),
    "shared modules": (
        [
            *(Case(zamba2, {"scaling": scaling, **MAMBA}) for scaling in ("channel", "tensor")),
            Case(zamba2, {**PACKED, **MAMBA}),
            Case(zamba, {"scaling": "channel", **MAMBA}),
        ],
        [
            Case(lambda: zamba2(2), MAMBA),
            Case(zamba2, {"skip": [*MAMBA["skip"], "shared_transf"]}),
            Case(zamba2, {**BLOCKS, **MAMBA}),
        ],
    ),
    "zero points of weights": (
        [Case(lambda: llama(256), {"format": "W4A16_ASYM"})],
        [Case(lambda: llama(256), PACKED), Case(lambda: llama(256), {"format": "W8A8_ASYM"})],
    ),
    "tables of embeddings": (
        [Case(lambda: llama(256), {"format": Rules({"embed_tokens|_proj": "W8A16"})})],
        [Case(lambda: llama(256), {"format": Rules({"_proj": "W8A16"})})],
    ),
    "partial blocks, misread": (
        [Case(lambda: llama(192, heads=3), BLOCKS), Case(lambda: llama(128, 448), BLOCKS)],
        [Case(lambda: llama(64, 128), BLOCKS), Case(lambda: llama(256, 96), BLOCKS)],
    ),
    "partial blocks, not read": (
        [Case(lambda: llama(576, heads=9), BLOCKS)],
        [Case(lambda: llama(512), BLOCKS)],
    ),
}


def errors_of(case, folder):
    """The relative errors of the logits in transformers, as users load the folder, and dequantized
    when it is loaded; infinite if it fails.
    """
    torch.manual_seed(0)
    model = case.make()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            # Rows of unlike size, as in real models: blocks must be where they are.
            parameter.data.normal_(0, 0.05)
            parameter.data[..., : parameter.shape[-2] // 3, :] *= 4
    model.save_pretrained(folder / "wide")
    report = convert(
        folder / "wide", folder / "out", allow_split=True, keep_unfitting=True, **case.options
    )
    dequantize_checkpoint(folder / "out", folder / "back", dtype="bfloat16")
    stack_experts(folder)
    expected = logits(type(model), folder / "back")
    options = [{}]
    if report.layout == "compressed-tensors":
        options += [{"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}]
    errors = []
    for option in options:
        try:
            found = logits(type(model), folder / "out", **option)
            error = float((found - expected).norm() / expected.norm())
        except Exception:  # whatever transformers raises
            error = math.inf
        errors.append(error if math.isfinite(error) else math.inf)
    return report, errors


def logits(cls, folder, **options):
    loaded = cls.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
    with torch.no_grad():
        return loaded(input_ids=IDS, use_cache=False).logits.double()


def stack_experts(folder):
    """Of Llama 4, whose unquantized experts transformers reads in one tensor."""
    wide, path = load_file(folder / "wide" / "model.safetensors"), folder / "back"
    back = load_file(path / "model.safetensors")
    for name, stack in wide.items():
        base, _, last = name.rpartition(".")
        if name not in back:
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            experts = [
                [back.pop(f"{base}.{e}.{p}.weight") for p in parts] for e in range(len(stack))
            ]
            back[name] = torch.stack([torch.cat(some).T for some in experts]).contiguous()
    save_file(back, path / "model.safetensors", {"format": "pt"})


TRIED = [row for row in CAUTIONS if row.version]


def test_every_row_is_tried():
    assert {row.key for row in TRIED} == CASES.keys()
    assert {row.version for row in TRIED} == {".".join(transformers.__version__.split(".")[:2])}


@pytest.fixture(autouse=True)
def uninitialized_is_nan():
    """What torch allocates and nobody writes is NaN: it could be an older copy of the weights."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # then torch fills such memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("row", "case"), [(row, case) for row in TRIED for case in CASES[row.key][0]]
)
def test_what_a_row_names_fails(tmp_path, row, case):
    report, errors = errors_of(case, tmp_path)
    assert row.fault in report.caution
    # Activations are rounded to 8 bits when the first layout runs.
    assert max(errors) > (0.4 if report.layout == "compressed-tensors" else 0.05)


@pytest.mark.parametrize("case", [case for row in TRIED for case in CASES[row.key][1]])
def test_what_no_row_names_loads(tmp_path, case):
    """As users load it, activations are rounded to 8 bits: hence the larger error."""
    report, errors = errors_of(case, tmp_path)
    assert report.caution == ""
    assert max(errors) < 0.4
    assert min(errors) < 0.05


def test_models_whose_experts_transformers_joins():
    joined = {
        model
        for model, converters in _build_checkpoint_conversion_mapping().items()
        for converter in converters
        if isinstance(converter, WeightConverter)
        if any(isinstance(one, MergeModulelist) for one in converter.operations)
    }
    assert {model for model in joined if model.islower()} == JOINED
