"""What a conversion will do with every tensor, decided from headers alone. No JAX here."""

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qtoolkit._version import __version__
from qtoolkit.checkpoints._arguments import PlanOptions
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
from qtoolkit.checkpoints._decode import check_explained, unused_entries
from qtoolkit.checkpoints._experts import split_for
from qtoolkit.checkpoints._formats import (
    WeightFormat,
    by_scheme,
    check_used,
    default_layout,
    element_dtype,
    high_precision_dtype,
    input_scale,
    model_dtype,
    safetensors_dtype,
    scheme_of,
    weight_format,
)
from qtoolkit.checkpoints._report import Plan, TensorPlan
from qtoolkit.checkpoints._roles import (
    AXIS_CHOICES,
    EMBEDDING,
    SKIPPED,
    Roles,
    fused_group,
    is_stack_of_experts,
)
from qtoolkit.checkpoints._tensors import METADATA_KEY, CheckpointError, MisuseError, listed, shown
from qtoolkit.checkpoints.layouts import LAYOUTS, WRITTEN, Layout, Scheme
from qtoolkit.checkpoints.layouts._layout import HIGH_PRECISION, SCALINGS
from qtoolkit.checkpoints.layouts._qarrays import remaining_arrays, undecoded_parts
from qtoolkit.formats import Rules, SpecLike
from qtoolkit.formats.internal import values_of_rules


def make_plan(source: Checkpoint, options: PlanOptions) -> Plan:
    """Decides what `convert` does with each tensor of `source`, of which only headers are read.

    A quantized checkpoint is given as `decode_weights` opens it.
    """
    for name, choices in (
        ("scaling", SCALINGS),
        ("layout", WRITTEN),
        ("channel_axis", AXIS_CHOICES),
    ):
        value = getattr(options, name)
        if value is not None and value not in [*choices]:  # the argument may have no hash
            raise ValueError(f"convert: {name}={value!r}, expected one of {', '.join(choices)}")
    format, scaling = by_scheme(options.format, options.scaling)
    layout, model = LAYOUTS.get(options.layout or ""), source.config.get("model_type")
    if layout and layout.experts_of and model not in (None, layout.experts_of):
        raise CheckpointError(
            f"{source.path}: layout {layout.name} holds the experts of {layout.experts_of}, and "
            f"the model is {shown(str(model))} by its config.json; use another layout="
        )
    formats = _formats(format)
    layout = layout or LAYOUTS[default_layout(source, values_of_rules(formats), scaling)]
    source, keep_dtype = split_for(source, layout.name), options.keep_dtype
    planner = _Planner(
        source=source,
        options=dataclasses.replace(options, format=format, scaling=scaling, layout=layout.name),
        layout=layout,
        keep_dtype=None if keep_dtype is None else high_precision_dtype(keep_dtype),
        roles=Roles(source.tensors, source.config, options.channel_axis),
        copied=undecoded_parts(source.metadata, source.tensors, source.encodings),
    )
    plan = planner.plan(formats)
    if not options.allow_split:
        check_split(source, plan)
    check_loads(source, plan)
    return plan


def _formats(format: SpecLike | Scheme | Rules[Any] | None) -> Rules[WeightFormat]:
    """The formats that rules name; of a single format rules with nothing but a default."""
    if isinstance(format, Rules):
        with _naming_the_rule():
            return format.map(weight_format)
    return Rules((), default=None if format is None else weight_format(format))


@contextlib.contextmanager
def _naming_the_rule() -> Iterator[None]:
    """Makes the errors of `Rules`, which name the rule, those of a checkpoint."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(shown(str(error))) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planner:
    """The choices of one conversion. `copied` are tensors of quantized arrays, `misfits` is what
    was met that a format does not fit.
    """

    source: Checkpoint
    options: PlanOptions
    layout: Layout
    keep_dtype: str | None
    roles: Roles
    copied: set[str]
    misfits: list[tuple[Tensor, Scheme, str]] = dataclasses.field(default_factory=list)

    def plan(self, formats: Rules[WeightFormat]) -> Plan:
        options = self.options
        chosen = formats if isinstance(options.format, Rules) else formats.default
        rules = self._schemes(formats)
        schemes = values_of_rules(rules)
        has_scales = any(scheme.needs_scale for scheme in schemes)
        if options.scaling is not None and not has_scales:
            names = ", ".join(dict.fromkeys(s.format for s in schemes)) or "what no rule quantizes"
            raise MisuseError(
                f"scaling={options.scaling!r}: {names} has no scales, expected no scaling=; omit it"
            )
        skip = skip_patterns(options.skip, self.source.tensors)

        def may_be_codes(name: str) -> bool:
            is_named = any(p.search(name) for p in skip) or rules.match_index(name) is not None
            return options.allow_codes or is_named

        ways = "allow_codes=True" if chosen is None else "skip= or allow_codes=True"
        remedy = f"; if it is what the model has, copy it as it is with {ways}"
        keeps_codes = check_explained(self.source, may_be_codes, remedy)
        tensors = tuple(
            self._tensor(tensor, *self._choice(tensor, rules, skip))
            for tensor in self.source.tensors.values()
        )
        if not options.keep_unfitting:
            check_fit(self.source, self.layout.name, self.misfits)
        check_names(self.source, tensors)
        check_used(options.input_scales, tensors, self.layout)
        used = used_schemes(tensors)
        if chosen is not None:
            self._check_schemes(used, tensors)
        words = dict.fromkeys(scheme.scaling or "none" for scheme in used)
        # Without any scheme in use, what was asked for.
        word = ", ".join(words) or ((options.scaling or "tensor") if has_scales else "none")
        unquantized = unquantized_modules(tensors) if used else []
        record = {"scaling": word} | ({"keeps_codes": True} if keeps_codes else {})
        return Plan(
            layout=self.layout.name,
            format=chosen,
            scaling=word,
            tensors=tensors,
            metadata=self._metadata(chosen, record, tensors, skip),
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

    def _schemes(self, formats: Rules[WeightFormat]) -> Rules[Scheme]:
        """The schemes of the layout for formats; raises where it cannot hold one."""

        def scheme(fmt: WeightFormat) -> Scheme:
            return scheme_of(self.layout, fmt, self.options.scaling)

        if not isinstance(self.options.format, Rules):
            return Rules((), default=None if formats.default is None else scheme(formats.default))
        with _naming_the_rule():
            schemes = formats.map(scheme)
            for key, _ in schemes.rules:
                if not isinstance(key, str):
                    raise TypeError(
                        f"Rules: rule {key.__name__} is a class, which JSON cannot hold; expected "
                        "a regular expression"
                    )
            schemes.check_used(str(self.source.path), self.source.tensors)
        return schemes

    def _choice(
        self, tensor: Tensor, rules: Rules[Scheme], skip: Sequence[re.Pattern[str]]
    ) -> tuple[Scheme | None, str]:
        """The scheme of a tensor, or None and the reason not to quantize it."""
        is_one_format = not isinstance(self.options.format, Rules)
        position, scheme = rules.match_index(tensor.name), rules.lookup(tensor.name)
        if tensor.name in self.copied and (is_one_format or scheme is None):
            return None, "of a quantized array that is copied"
        if position is None and tensor.dtype not in (*HIGH_PRECISION, "F64"):
            return None, f"dtype {tensor.dtype}"
        if scheme is not None and element_dtype(scheme) == tensor.dtype:
            return None, f"{tensor.dtype} already"
        if is_one_format and len(tensor.shape) < 2:
            return None, "fewer than two dimensions"
        if any(pattern.search(tensor.name) for pattern in skip):
            return None, "skip="
        if is_one_format and SKIPPED.search(tensor.name):
            return None, "skipped by default"
        if is_one_format and scheme is None:
            return None, "dequantized"
        if is_one_format and (reason := self._not_held(tensor)):
            return None, reason
        if self.layout.linear_only and 0 in tensor.shape:
            return None, "empty"
        if scheme is None:
            return None, "no rule" if position is None else f"rule {rules.rules[position][0]!r}"
        return scheme, ""

    def _not_held(self, tensor: Tensor) -> str:
        """Why the layout has no place for tensors of this kind; "" if it has."""
        if self.layout.experts_of:
            return "" if is_stack_of_experts(tensor) else f"{self.layout.name} holds experts only"
        if not self.layout.linear_only or len(tensor.shape) == 2:
            return ""
        model, others = self.source.config.get("model_type"), LAYOUTS.values()
        other = next((one.name for one in others if model and one.experts_of == model), "")
        hint = f"; layout={other!r} holds experts" if other and is_stack_of_experts(tensor) else ""
        return f"{len(tensor.shape)} dimensions, {self.layout.name} holds matrices{hint}"

    def _tensor(self, tensor: Tensor, scheme: Scheme | None, reason: str) -> TensorPlan:
        if scheme is None:
            return self._unquantized(tensor, reason)
        if tensor.name in self.copied:
            raise self._error(
                tensor, "of a quantized array, which rules cannot quantize again; exclude it"
            )
        if tensor.dtype not in HIGH_PRECISION:
            raise self._error(
                tensor, f"dtype {tensor.dtype}, expected F32, F16 or BF16; exclude it with skip="
            )
        if not scheme.needs_scale:
            dtype = safetensors_dtype(scheme.spec.element)
            return TensorPlan(source=tensor, action="quantize", dtype=dtype, spec=scheme.spec)
        # Blocks lie in the last two axes, which in a convolution [O, I, kh, kw] have kh * kw
        # elements: a 1x1 convolution would get a float32 scale for every element.
        is_by_block = scheme.scaling == "block" and len(tensor.shape) > 3
        if is_by_block and self.roles.outputs_last(tensor) is False:
            scheme = scheme_of(self.layout, scheme.spec.element, "channel")
        if self.options.input_scales is not None:
            scheme = self.layout.static.get(scheme, scheme)
        try:
            if self.layout.linear_only:
                self._check_linear(tensor, scheme)
            if reason := self.layout.misfit(tensor.shape, scheme.spec):
                self.misfits.append((tensor, scheme, reason))
                return self._unquantized(tensor, reason)
            by_channel = scheme.scaling == "channel" and len(tensor.shape) > 1
            axes = self.roles.axes(tensor) if by_channel else ()
            scale = input_scale(self.options.input_scales, tensor, scheme, self.layout)
            encoding = self.layout.store(tensor.entry, scheme, axes, scale)
        except CheckpointError as error:
            raise CheckpointError(f"{self.source.path}: {error}") from error
        shares = encoding.spec.tensor_scale is not None
        group = fused_group(tensor.name) if shares else ""
        return TensorPlan.quantized(tensor, encoding, scheme, group)

    def _check_linear(self, tensor: Tensor, scheme: Scheme) -> None:
        if self.layout.experts_of:
            if not is_stack_of_experts(tensor) or not self.roles.outputs_last(tensor):
                raise CheckpointError(
                    f"tensor {shown(tensor.name)}, {list(tensor.shape)}: expected all experts of a "
                    f"layer, [experts, inputs, outputs], as layout {self.layout.name} holds them; "
                    "exclude it by a rule or with skip=, or use another layout="
                )
            return
        # Not "/weight": other entries replace what follows the last dot of the name.
        if len(tensor.shape) != 2 or not f".{tensor.name}".endswith(".weight"):
            raise CheckpointError(
                f"tensor {shown(tensor.name)}, {list(tensor.shape)}: expected a matrix named "
                f"NAME.weight, as layout {self.layout.name} holds them; exclude it with skip=, or "
                'use layout="plain"'
            )
        if EMBEDDING.search(tensor.name):
            check_table(tensor, scheme, self.layout, self.roles)
        if self.roles.outputs_last(tensor):
            raise CheckpointError(
                f"tensor {shown(tensor.name)}, {list(tensor.shape)}: it is [inputs, outputs], as "
                f"GPT-2's Conv1D or by channel_axis=, and layout {self.layout.name} holds "
                '[outputs, inputs] only; use layout="plain"'
            )

    def _unquantized(self, tensor: Tensor, reason: str) -> TensorPlan:
        """A tensor that is copied, or cast to another dtype of high precision."""
        is_cast = tensor.dtype in HIGH_PRECISION and tensor.name not in self.copied
        wanted = self.keep_dtype if is_cast else None
        if wanted is None and tensor.encoding is not None:
            wanted = model_dtype(self.source.config)
        return TensorPlan.unquantized(tensor, wanted or tensor.dtype, reason)

    def _error(self, tensor: Tensor, message: str) -> CheckpointError:
        return CheckpointError(f"{self.source.path}: tensor {shown(tensor.name)}: {message}")

    def _metadata(
        self,
        chosen: Any,
        record: Mapping[str, Any],
        tensors: Sequence[TensorPlan],
        skip: Sequence[re.Pattern[str]],
    ) -> dict[str, str]:
        changed = {t.name for t in tensors if t.action != "keep"}
        changed |= self.source.encodings.keys()
        metadata = remaining_arrays(self.source.metadata, changed)
        if self.layout.linear_only:
            metadata["format"] = "pt"  # transformers asks for it
        if chosen is None:
            metadata.pop(METADATA_KEY, None)
            return metadata
        record = {**record, "version": __version__}
        if isinstance(chosen, Rules):
            named = chosen.map(lambda fmt: fmt.name)
            record["rules"] = {"rules": named.rules, "default": named.default}
        else:
            record["format"] = chosen.name
        if self.layout.name != "plain":
            record["layout"] = self.layout.name
        keep_dtype = None if self.keep_dtype is None else HIGH_PRECISION[self.keep_dtype].name
        resolved = dataclasses.replace(
            self.options, format=chosen, skip=skip, keep_dtype=keep_dtype
        )
        record["arguments"] = resolved.to_json()
        return {**metadata, METADATA_KEY: json.dumps(record, sort_keys=True)}
