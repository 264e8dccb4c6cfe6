"""Checks of a plan: refuses, before anything is written, what loaders are known to misread.

Imports no JAX.
"""

import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._folder import ADAPTER_CONFIG, CONFIG
from qtoolkit.checkpoints._report import Plan, TensorPlan
from qtoolkit.checkpoints._roles import Roles, engine_group, experts_of, module_of
from qtoolkit.checkpoints._storage import join
from qtoolkit.checkpoints._tensors import CheckpointError, listed, over_layers, shown
from qtoolkit.checkpoints.layouts import Layout, Scheme

DIFFUSERS = "_class_name"  # a config.json with this key belongs to a model of diffusers
_OF_GGUF = re.compile(r"^(v\.|a\.|enc\.|dec\.)?blk\.\d+\.")  # "blk.0.", a layer in llama.cpp


def check_loads(source: Checkpoint, plan: Plan) -> None:
    """Raises if loaders would use codes as if they were weights, or would not find a weight."""
    folder, path = source.folder, source.path
    codes = [tensor.name for tensor in plan.tensors if tensor.encoding is not None]
    named = next(filter(_OF_GGUF.search, codes), None)
    problem = ""
    if folder is not None and folder.is_adapter and codes:
        problem = (
            f"the weights of an adapter ({ADAPTER_CONFIG}), and PEFT would load their codes as "
            "weights; merge it into its model first (merge_and_unload)"
        )
    elif folder is not None and plan.quantization_config and DIFFUSERS in source.config:
        problem = (
            f"a model of diffusers, by {DIFFUSERS} in {CONFIG}, which loads no weights in layout "
            f'{plan.layout}; use layout="plain", which `qtoolkit dequantize` undoes'
        )
    elif folder is not None and plan.quantization_config and not folder.has_config:
        problem = (
            f"no {CONFIG}, and loaders of layout {plan.layout} learn from it that weights are "
            'codes; fetch it, use layout="plain"'
        )
    elif plan.quantization_config and named is not None:
        raise CheckpointError(
            f"{path}: tensor {shown(named)}: named as in GGUF, and no loader of layout "
            f"{plan.layout} finds it; convert the folder that the GGUF was made from, or what "
            "transformers makes of it: from_pretrained(FOLDER, gguf_file=NAME) and "
            'save_pretrained(SRC); or use layout="plain"'
        )
    if problem and folder is not None:
        one = folder.weights[0] if len(folder.weights) == 1 else ""
        itself = f", or give the file itself: {join(path, one)}" if one else ""
        raise CheckpointError(f"{path}: {problem}{itself}")


def check_fit(
    source: Checkpoint, layout: str, misfits: Sequence[tuple[Tensor, Scheme, str]]
) -> None:
    """Raises if there are weights whose shape does not fit the blocks of their format.

    `misfits` has (weight, scheme, reason) for each of them. The message names each weight; weights
    of several layers it names together: "32 tensors layers.*.mlp.weight".
    """
    if not misfits:
        return
    names_by_problem: dict[tuple[str, str], list[str]] = {}
    for tensor, scheme, reason in misfits:
        pattern = over_layers(tensor.name)
        problem = f"{list(tensor.shape)}: {reason} for {scheme.spec.name} in layout {layout}"
        names_by_problem.setdefault((pattern, problem), []).append(tensor.name)
    problems = [
        f"tensor {shown(names[0])}, {problem}"
        if len(names) == 1
        else f"{len(names)} tensors {shown(pattern)}, {problem}"
        for (pattern, problem), names in names_by_problem.items()
    ]
    scheme = misfits[0][1]
    other = "" if layout == "compressed-tensors" else 'layout="compressed-tensors" with '
    channel = "" if scheme.scaling is None else f', or use {other}scaling="channel"'
    smaller = ""
    if 128 in scheme.spec.block and not channel:
        smaller = 'a format of smaller blocks, such as "int4_group32", or '
    raise CheckpointError(
        f"{source.path}: write {smaller}keep_unfitting=True to exclude what does not fit, skip= "
        f"for what you name{channel}: {listed(problems, 4, '; ')}"
    )


def check_table(tensor: Tensor, scheme: Scheme, layout: Layout, roles: Roles) -> None:
    """Raises if no loader of the layout looks up codes of this scheme in a table of embeddings."""
    remedy = "exclude it by a rule or with skip="
    if scheme not in layout.tables:
        held = " or ".join(sorted({one.name for one in layout.tables}))
        others = f", and tables in {held}" if held else ""
        raise CheckpointError(
            f"tensor {shown(tensor.name)}: a table of embeddings by its name, and loaders of "
            f"layout {layout.name} take {scheme.name} for linear layers only{others}; {remedy}, or "
            'use layout="plain"'
        )
    if roles.has_tied_head():
        raise CheckpointError(
            f"tensor {shown(tensor.name)}: the head is tied to this table, by config.json or "
            f"because it has no weight, and loaders look for one; {remedy}, or save the model with "
            "tie_word_embeddings=false and a head"
        )


def check_split(source: Checkpoint, plan: Plan) -> None:
    """Raises if weights that engines join into one layer are not all quantized by one scheme."""
    # vLLM and SGLang join q_proj, k_proj and v_proj, for example. They look up one scheme for the
    # joined layer by the names of its parts, and vLLM fails if the parts have different ones.
    if not plan.quantization_config:
        return
    groups: dict[str, list[TensorPlan]] = {}
    for tensor in plan.tensors:
        is_weight = tensor.name.endswith(".weight") and len(tensor.source.shape) == 2
        group = engine_group(tensor.name)
        if is_weight or (group.endswith("experts") and len(tensor.source.shape) == 3):
            groups.setdefault(group, []).append(tensor)
    split = {name: ts for name, ts in groups.items() if len({t.scheme for t in ts}) > 1}
    if not split:
        return
    group, parts = next(iter(split.items()))
    by_state: dict[str, list[str]] = {}
    for part in parts:
        state = part.scheme.spelling if part.scheme else f"not quantized: {part.reason}"
        by_state.setdefault(state, []).append(part.name)
    states = "; ".join(f"{listed(map(shown, ns), 2)} ({state})" for state, ns in by_state.items())
    others = f", and so for {len(split) - 1} more" if len(split) > 1 else ""
    raise CheckpointError(
        f"{source.path}: one layer for engines, {shown(group)}, would have parts in several "
        f"schemes: {states}{others}; expected one for all parts: vLLM and SGLang join them. Write "
        f"skip={_pattern_of(split)!r} to quantize none of them, give them one format by rules, or "
        "allow_split=True for loaders that do not join them"
    )


def _pattern_of(split: Mapping[str, Sequence[TensorPlan]]) -> str:
    """A regular expression for `skip` that matches each of these tensors."""
    modules: dict[str, None] = {}
    for group, parts in split.items():
        is_experts = re.search(r"(^|[./])experts$", group) is not None
        # The last two parts of the name, "encoder_attn.k_proj": "k_proj" alone would also match
        # "self_attn.k_proj", which belongs to another layer.
        matches = [re.search(r"([^.\d]\w*\.)?\w+$", module_of(part.name)) for part in parts]
        names = ["experts"] if is_experts else [match[0] for match in matches if match]
        modules |= dict.fromkeys(names)
    return rf"(^|\.)({'|'.join(map(re.escape, modules))})\."


def used_schemes(tensors: Iterable[TensorPlan]) -> dict[Scheme, list[str]]:
    """The schemes in use and the modules of each."""
    used: dict[Scheme, list[str]] = {}
    for tensor in tensors:
        if tensor.scheme is not None:
            used.setdefault(tensor.scheme, []).append(module_of(tensor.name))
    return used


def unquantized_modules(tensors: Sequence[TensorPlan]) -> list[str]:
    """Modules with a matrix that is not quantized, and `lm_head`, which may have no tensor."""
    quantized = {module_of(t.name) for t in tensors if t.action == "quantize"}
    with_experts = {experts_of(t.name, len(t.source.shape)) for t in tensors if t.encoding}
    modules, experts = [], dict[str, None]()
    for tensor in tensors:
        rank, is_weight = len(tensor.source.shape), tensor.name.endswith(".weight")
        if tensor.action != "quantize" and rank == 2 and is_weight:
            modules.append(module_of(tensor.name))
        # If no expert of a layer is quantized, the loaders must find this out. vLLM looks for the
        # three projections of expert 0, even if the file calls them otherwise. transformers looks
        # for the module itself if one tensor (of rank 3) holds all experts.
        module = experts_of(tensor.name, rank)
        if not module or module in with_experts:
            continue
        if rank == 3:
            experts[module] = None
        if rank == 3 or (rank == 2 and is_weight):
            names = ("gate_proj", "up_proj", "down_proj")
            experts |= dict.fromkeys(f"{module}.0.{name}" for name in names)
    modules += [name for name in experts if name not in modules]
    if "lm_head" not in quantized and "lm_head" not in modules:
        modules.append("lm_head")
    return modules


def check_names(source: Checkpoint, tensors: Iterable[TensorPlan]) -> None:
    """Raises where two entries of the target would have one name."""
    taken: dict[str, str] = {}
    for tensor in tensors:
        for entry in tensor.entries:
            if entry.name in taken or (entry.name != tensor.name and entry.name in source.tensors):
                raise CheckpointError(
                    f"{source.path}: tensor {shown(tensor.name)}: its scale would be named "
                    f"{shown(entry.name)}, which the file has already, expected a free name; "
                    "exclude the tensor with skip= or rename it"
                )
            taken[entry.name] = tensor.name


def skip_patterns(skip: Any, names: Collection[str]) -> list[re.Pattern[str]]:
    """The regular expressions of `skip`; raises if one is invalid or matches no name."""
    texts = [skip] if isinstance(skip, str) or not isinstance(skip, Iterable) else [*skip]
    # What `re.compile` returns has an attribute `pattern`, and is accepted, too.
    if not all(isinstance(getattr(one, "pattern", one), str) for one in texts):
        raise TypeError(
            f"convert: skip={reprlib.repr(skip)}, expected regular expressions as strings, such as "
            "skip=['lm_head']"
        )
    patterns = compile_patterns(texts)
    for pattern in patterns:
        if not any(map(pattern.search, names)):
            raise CheckpointError(
                f"skip={pattern.pattern!r} matches nothing, expected a regular expression "
                "that is found in the name of a tensor; there is "
                + (listed(map(shown, names), 3) or "nothing")
            )
    return patterns


def compile_pattern(pattern: str, argument: str = "skip") -> re.Pattern[str]:
    """`re.compile` of a pattern of an argument; raises CheckpointError if it is invalid."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"{argument}={pattern!r}: invalid regular expression ({error}), expected one such as "
            r"'(^|/)head/'; write special characters with a backslash"
        ) from error


def compile_patterns(
    patterns: str | Sequence[str], argument: str = "skip"
) -> list[re.Pattern[str]]:
    """Each of several patterns; a string is one, not a pattern for each letter."""
    return [
        compile_pattern(x, argument)
        for x in ([patterns] if isinstance(patterns, str) else patterns)
    ]
