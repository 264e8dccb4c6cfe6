"""What a conversion will do with every tensor, decided from headers alone. No JAX here."""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit._version import __version__
from qtoolkit.checkpoints._arguments import arguments_to_json
from qtoolkit.checkpoints._cautions import Target, cautions_of
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._checks import (
    check_fit,
    check_loads,
    check_names,
    check_split,
    check_table,
    skip_patterns,
    unquantized_modules,
    used_schemes,
)
from qtoolkit.checkpoints._codes import check_explained
from qtoolkit.checkpoints._decode import unused_entries
from qtoolkit.checkpoints._experts import split_for
from qtoolkit.checkpoints._formats import (
    InputScales,
    TargetFormat,
    by_scheme,
    check_used,
    default_layout,
    dtype_of,
    high_precision_dtype,
    input_scale,
    model_dtype,
    resolve_target,
    safetensors_dtype,
    scheme_of,
)
from qtoolkit.checkpoints._report import Plan, TensorPlan
from qtoolkit.checkpoints._roles import (
    AXIS_CHOICES,
    EMBEDDING,
    SKIPPED,
    AxisChoice,
    Roles,
    fused_group,
    is_stack_of_experts,
)
from qtoolkit.checkpoints._tensors import CheckpointError, MisuseError, listed, shown
from qtoolkit.checkpoints.layouts import LAYOUTS, WRITTEN, Layout, Scheme
from qtoolkit.checkpoints.layouts._layout import HIGH_PRECISION, SCALINGS
from qtoolkit.checkpoints.layouts._qarrays import remaining_arrays, undecoded_parts
from qtoolkit.formats import BlockFormat, Format, FormatLike, Rules, SpecLike
from qtoolkit.formats.internal import values_of_rules

METADATA_KEY = "qtoolkit"


def make_plan(
    source: Checkpoint,
    *,
    format: SpecLike | Rules[Any] | None = "e4m3fn",
    scaling: str | None = None,
    layout: str | None = None,
    skip: Sequence[str] = (),
    keep_dtype: FormatLike | None = None,
    channel_axis: AxisChoice = "auto",
    input_scales: InputScales | None = None,
    allow_codes: bool = False,
    allow_split: bool = False,
    keep_unfitting: bool = False,
) -> Plan:
    """Decides what `convert`, of whose arguments these are, does with each tensor of `source`.

    Only headers are read. A quantized checkpoint is given as `decode_weights` opens it. `format`
    may be None: nothing is quantized.
    """
    for name, value, choices in (
        ("scaling", scaling, SCALINGS),
        ("layout", layout, WRITTEN),
        ("channel_axis", str(channel_axis), AXIS_CHOICES),
    ):
        if value is not None and value not in [*choices]:  # the argument may have no hash
            raise ValueError(f"convert: {name}={value!r}, expected one of {', '.join(choices)}")
    format, scaling = by_scheme(format, scaling)
    chosen = LAYOUTS[layout or default_layout(source, format, scaling)]
    model = source.config.get("model_type")
    if chosen.experts_of and model not in (None, chosen.experts_of):
        raise CheckpointError(
            f"{source.path}: layout {chosen.name} holds the experts of {chosen.experts_of}, and "
            f"the model is {shown(str(model))} by its config.json; use another layout="
        )
    source = split_for(source, chosen.name)
    planner = _Planner(
        source=source,
        layout=chosen,
        scaling=scaling,
        keep_dtype=None if keep_dtype is None else high_precision_dtype(keep_dtype),
        roles=Roles(source.tensors, source.config, channel_axis),
        input_scales=input_scales,
        keep_unfitting=keep_unfitting,
        copied=undecoded_parts(source.metadata, source.tensors, source.encodings),
        others={
            "channel_axis": None if channel_axis == "auto" else channel_axis,
            "allow_codes": allow_codes,
            "allow_split": allow_split,
        },
    )
    plan = planner.plan(format, skip, allow_codes)
    if not allow_split:
        check_split(source, plan)
    check_loads(source, plan)
    return plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planner:
    """The choices of one conversion. `copied` are tensors of quantized arrays, `others` arguments
    that are only recorded, `misfits` is what was met that a format does not fit.
    """

    source: Checkpoint
    layout: Layout
    scaling: str | None
    keep_dtype: str | None
    roles: Roles
    input_scales: InputScales | None
    keep_unfitting: bool
    copied: set[str]
    others: Mapping[str, Any]
    misfits: list[tuple[Tensor, Scheme, str]] = dataclasses.field(default_factory=list)

    def plan(
        self, format: SpecLike | Rules[Any] | None, skip: Sequence[str], allow_codes: bool
    ) -> Plan:
        chosen, rules = self._rules(format)
        formats = values_of_rules(rules)
        has_scales = any(isinstance(f, BlockFormat) or f.needs_scale for f in formats)
        if self.scaling is not None and not has_scales:
            names = ", ".join(dict.fromkeys(f.name for f in formats)) or "what no rule quantizes"
            raise MisuseError(
                f"scaling={self.scaling!r}: {names} has no scales, expected no scaling=; omit it"
            )
        is_one_format = not isinstance(chosen, Rules)
        patterns = skip_patterns(skip, self.source.tensors)

        def may_be_codes(name: str) -> bool:
            is_named = any(p.search(name) for p in patterns) or rules.match_index(name) is not None
            return allow_codes or is_named

        ways = "allow_codes=True" if chosen is None else "skip= or allow_codes=True"
        remedy = f"; if it is what the model has, copy it as it is with {ways}"
        keeps_codes = check_explained(self.source, may_be_codes, remedy)
        tensors = tuple(
            self._tensor(info, *self._choice(info, rules, is_one_format, patterns))
            for info in self.source.tensors.values()
        )
        if not self.keep_unfitting:
            check_fit(self.source, self.layout.name, self.misfits)
        check_names(self.source, tensors)
        check_used(self.input_scales, tensors, self.layout)
        used = used_schemes(tensors)
        if format is not None:
            self._check_schemes(used, tensors)
        words = dict.fromkeys(scheme.scaling or "none" for scheme in used)
        # Without any scheme in use, what was asked for.
        word = ", ".join(words) or ((self.scaling or "tensor") if has_scales else "none")
        unquantized = unquantized_modules(tensors) if used else []
        return Plan(
            layout=self.layout.name,
            format=chosen,
            scaling=word,
            tensors=tensors,
            metadata=self._metadata(chosen, word, tensors, keeps_codes, patterns),
            quantization_config=self.layout.config(used, unquantized) if used else {},
            files=self.layout.files(used, unquantized) if used else {},
            dequantizes=self.source.layout,
            caution=". ".join(self._cautions(tensors)),
        )

    def _cautions(self, tensors: Sequence[TensorPlan]) -> list[str]:
        cautions = cautions_of(Target(self.layout.name, self.source.config, tensors))
        if entries := unused_entries(self.source):
            cautions.append(
                f"tensor {listed(map(shown, entries), 3)} of the source: in the module of a "
                "weight, and read as no part of it; compare the weight with what the program that "
                "made it computes"
            )
        return cautions

    def _check_schemes(
        self, used: Mapping[Scheme, Sequence[str]], tensors: Sequence[TensorPlan]
    ) -> None:
        """Raises if the layout cannot hold these schemes together, or nothing is quantized."""
        if not used and self.layout.linear_only:
            reasons = [tensor.reason for tensor in tensors if tensor.reason]
            counted = ", ".join(f"{r}: {reasons.count(r)}" for r in dict.fromkeys(reasons))
            raise CheckpointError(
                f"{self.source.path}: nothing to quantize for layout {self.layout.name} "
                f"({counted or 'no tensors'}), expected matrices named NAME.weight; "
                'layout="plain" and rules take others'
            )
        if len(used) > 1 and not self.layout.is_mixed:
            raise CheckpointError(
                f"layout {self.layout.name}: {len(used)} formats by the rules, expected one; only "
                "compressed-tensors holds several"
            )
        for tensor, (pattern, reason) in itertools.product(tensors, self.layout.refused.items()):
            if used and re.search(pattern, tensor.name):
                raise self._error(tensor.source, reason)

    def _rules(
        self, format: SpecLike | Rules[Any] | None
    ) -> tuple[TargetFormat | Rules[Any] | None, Rules[Any]]:
        if not isinstance(format, Rules):
            one = None if format is None else self._target(format)
            return one, Rules((), default=one)
        try:
            rules: Rules[Any] = format.map(self._target)
            for key, _ in rules.rules:
                if not isinstance(key, str):
                    raise TypeError(
                        f"Rules: rule {key.__name__} is a class, which JSON cannot hold; expected "
                        "a regular expression"
                    )
            rules.check_used(str(self.source.path), self.source.tensors)
        except ValueError as error:
            raise CheckpointError(shown(str(error))) from error
        return rules, rules

    def _target(self, fmt: SpecLike) -> TargetFormat:
        """The format of this spelling; raises where the layout cannot hold it."""
        target = resolve_target(fmt)
        scheme_of(self.layout, target, self.scaling)
        return target

    def _choice(
        self, info: Tensor, rules: Rules[Any], is_one_format: bool, skip: list[re.Pattern[str]]
    ) -> tuple[TargetFormat | None, str]:
        """The format of a tensor, or None and the reason not to quantize it."""
        position, fmt = rules.match_index(info.name), rules.lookup(info.name)
        if info.name in self.copied and (is_one_format or fmt is None):
            return None, "of a quantized array that is copied"
        if position is None and info.dtype not in (*HIGH_PRECISION, "F64"):
            return None, f"dtype {info.dtype}"
        if fmt is not None and dtype_of(fmt) == info.dtype:
            return None, f"{info.dtype} already"
        if is_one_format and len(info.shape) < 2:
            return None, "fewer than two dimensions"
        if any(pattern.search(info.name) for pattern in skip):
            return None, "skip="
        if is_one_format and SKIPPED.search(info.name):
            return None, "skipped by default"
        if is_one_format and fmt is None:
            return None, "dequantized"
        if is_one_format and (reason := self._not_held(info)):
            return None, reason
        if self.layout.linear_only and 0 in info.shape:
            return None, "empty"
        if fmt is None:
            return None, "no rule" if position is None else f"rule {rules.rules[position][0]!r}"
        return fmt, ""

    def _not_held(self, info: Tensor) -> str:
        """Why the layout has no place for tensors of this kind; "" if it has."""
        if self.layout.experts_of:
            return "" if is_stack_of_experts(info) else f"{self.layout.name} holds experts only"
        if not self.layout.linear_only or len(info.shape) == 2:
            return ""
        model, others = self.source.config.get("model_type"), LAYOUTS.values()
        other = next((one.name for one in others if model and one.experts_of == model), "")
        hint = f"; layout={other!r} holds experts" if other and is_stack_of_experts(info) else ""
        return f"{len(info.shape)} dimensions, {self.layout.name} holds matrices{hint}"

    def _tensor(self, info: Tensor, fmt: TargetFormat | None, reason: str) -> TensorPlan:
        if fmt is None:
            return self._unquantized(info, reason)
        if info.name in self.copied:
            raise self._error(
                info, "of a quantized array, which rules cannot quantize again; exclude it"
            )
        if info.dtype not in HIGH_PRECISION:
            raise self._error(
                info, f"dtype {info.dtype}, expected F32, F16 or BF16; exclude it with skip="
            )
        if isinstance(fmt, Format) and not fmt.needs_scale:
            dtype = safetensors_dtype(fmt)
            spec = BlockFormat.tensor(fmt, scale=None)
            return TensorPlan(source=info, action="quantize", dtype=dtype, spec=spec)
        scheme = scheme_of(self.layout, fmt, self.scaling)
        # Blocks lie in the last two axes, which in a convolution [O, I, kh, kw] have kh * kw
        # elements: a 1x1 convolution would get a float32 scale for every element.
        is_by_block = scheme.scaling == "block" and len(info.shape) > 3
        if is_by_block and self.roles.outputs_last(info) is False:
            scheme = scheme_of(self.layout, fmt, "channel")
        if self.input_scales is not None:
            scheme = self.layout.static.get(scheme, scheme)
        try:
            if self.layout.linear_only:
                self._check_linear(info, scheme)
            if reason := self.layout.misfit(info.shape, scheme.spec):
                self.misfits.append((info, scheme, reason))
                return self._unquantized(info, reason)
            by_channel = scheme.scaling == "channel" and len(info.shape) > 1
            axes = self.roles.axes(info) if by_channel else ()
            scale = input_scale(self.input_scales, info, scheme, self.layout)
            encoding = self.layout.encode(info.entry, scheme, axes, scale)
        except CheckpointError as error:
            raise CheckpointError(f"{self.source.path}: {error}") from error
        shares = encoding.spec.tensor_scale is not None
        group = fused_group(info.name) if shares else ""
        return TensorPlan.quantized(info, encoding, scheme, group)

    def _check_linear(self, info: Tensor, scheme: Scheme) -> None:
        if self.layout.experts_of:
            if not is_stack_of_experts(info) or not self.roles.outputs_last(info):
                raise CheckpointError(
                    f"tensor {shown(info.name)}, {list(info.shape)}: expected all experts of a "
                    f"layer, [experts, inputs, outputs], as layout {self.layout.name} holds them; "
                    "exclude it by a rule or with skip=, or use another layout="
                )
            return
        # Not "/weight": other entries replace what follows the last dot of the name.
        if len(info.shape) != 2 or not f".{info.name}".endswith(".weight"):
            raise CheckpointError(
                f"tensor {shown(info.name)}, {list(info.shape)}: expected a matrix named "
                f"NAME.weight, as layout {self.layout.name} holds them; exclude it with skip=, or "
                'use layout="plain"'
            )
        if EMBEDDING.search(info.name):
            check_table(info, scheme, self.layout, self.roles)
        if self.roles.outputs_last(info):
            raise CheckpointError(
                f"tensor {shown(info.name)}, {list(info.shape)}: it is [inputs, outputs], as "
                f"GPT-2's Conv1D or by channel_axis=, and layout {self.layout.name} holds "
                '[outputs, inputs] only; use layout="plain"'
            )

    def _unquantized(self, info: Tensor, reason: str) -> TensorPlan:
        """A tensor that is copied, or cast to another dtype of high precision."""
        is_cast = info.dtype in HIGH_PRECISION and info.name not in self.copied
        wanted = self.keep_dtype if is_cast else None
        if wanted is None and info.encoding is not None:
            wanted = model_dtype(self.source.config)
        return TensorPlan.unquantized(info, wanted or info.dtype, reason)

    def _error(self, info: Tensor, message: str) -> CheckpointError:
        return CheckpointError(f"{self.source.path}: tensor {shown(info.name)}: {message}")

    def _metadata(
        self,
        chosen: Any,
        word: str,
        tensors: Sequence[TensorPlan],
        keeps_codes: bool,
        skip: Sequence[re.Pattern[str]],
    ) -> dict[str, str]:
        record: dict[str, Any] = {"scaling": word, "version": __version__}
        if keeps_codes:
            record["keeps_codes"] = True
        if isinstance(chosen, Rules):
            named = chosen.map(lambda fmt: fmt.name)
            record["rules"] = {"rules": named.rules, "default": named.default}
        elif chosen is not None:
            record["format"] = chosen.name
        if self.layout.name != "plain":
            record["layout"] = self.layout.name
        changed = {t.name for t in tensors if t.action != "keep"}
        changed |= self.source.encodings.keys()
        metadata = remaining_arrays(self.source.metadata, changed)
        if self.layout.linear_only:
            metadata["format"] = "pt"  # transformers asks for it
        if chosen is None:
            metadata.pop(METADATA_KEY, None)
            return metadata
        record["arguments"] = arguments_to_json(
            chosen,
            skip,
            scaling=self.scaling,
            layout=self.layout.name,
            keep_dtype=self.keep_dtype and HIGH_PRECISION[self.keep_dtype].name,
            input_scales=self.input_scales,
            keep_unfitting=self.keep_unfitting,
            **self.others,
        )
        return {**metadata, METADATA_KEY: json.dumps(record, sort_keys=True)}
