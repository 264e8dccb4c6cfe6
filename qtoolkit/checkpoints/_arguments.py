"""`PlanOptions`, the arguments of a plan; as JSON, too, by which `verify` plans again."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._roles import AxisChoice
from qtoolkit.checkpoints.layouts import Scheme
from qtoolkit.formats import BLOCK_FORMATS, BlockFormat, Format, FormatLike, Rules, SpecLike

InputScales = float | Mapping[str, float]  # one for all modules, or by module
_PUBLISHED = {fmt.name: fmt for fmt in BLOCK_FORMATS}
_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The arguments of `convert` that a plan depends on; `convert` says what they mean.

    `format` may be None: nothing is quantized.
    """

    format: SpecLike | Scheme | Rules[Any] | None = "e4m3fn"
    scaling: str | None = None
    layout: str | None = None
    skip: Sequence[str | re.Pattern[str]] = ()
    keep_dtype: FormatLike | None = None
    channel_axis: AxisChoice = "auto"
    input_scales: InputScales | None = None
    allow_codes: bool = False
    allow_split: bool = False
    keep_unfitting: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON data of options whose format is resolved; those that say nothing are omitted."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.format, Rules):
            rules = [[key, _format_data(fmt)] for key, fmt in self.format.rules]
            data["format"] = {"rules": rules, "default": _format_data(self.format.default)}
        else:
            data["format"] = _format_data(self.format)
        if isinstance(scales := self.input_scales, Mapping):
            data["input_scales"] = {name: float(scale) for name, scale in scales.items()}
        elif scales is not None:
            data["input_scales"] = float(scales)
        data["skip"] = [_pattern_text(pattern) for pattern in self.skip]
        return {
            name: value for name, value in data.items() if value not in (None, False, [], "auto")
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PlanOptions":
        """The options that `to_json` made JSON of.

        Raises:
          ValueError, TypeError, KeyError, AttributeError: It made no such JSON.
        """
        chosen: Any = data["format"]
        if isinstance(chosen, Mapping) and "rules" in chosen:
            pairs = [(key, _format(value)) for key, value in chosen["rules"]]
            chosen = Rules(pairs, _format(chosen["default"]))
        else:
            chosen = _format(chosen)
        return cls(**{**data, "format": chosen})


def _format_data(fmt: Any) -> Any:
    """The name of a format or scheme; of a block format that is not published, its fields."""
    if not isinstance(fmt, BlockFormat):
        return fmt.name if isinstance(fmt, Format | Scheme) else fmt
    if _PUBLISHED.get(fmt.name) == fmt:
        return fmt.name
    from qtoolkit.products.internal import spec_to_json  # loads JAX

    return {"spec": spec_to_json(fmt)}


def _format(data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    from qtoolkit.products.internal import spec_from_json  # loads JAX

    return spec_from_json(data["spec"])


def _pattern_text(pattern: str | re.Pattern[str]) -> str:
    """A regular expression with its flags: "(?i:head)"."""
    pattern = re.compile(pattern)
    flags = "".join(letter for letter, flag in _FLAGS.items() if pattern.flags & flag)
    return f"(?{flags}:{pattern.pattern})" if flags else pattern.pattern
