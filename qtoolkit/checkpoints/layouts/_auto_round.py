"""AutoRound: entries of GPTQ or of AutoAWQ, as `packing_format` of the config says.

"auto_round:auto_gptq" stores zero points minus one, "auto_round" and "auto_round:gptqmodel" as they
are. `extra_config` gives single modules other bits and groups.
Source: github.com/intel/auto-round, inference/convert_model.py, infer_target_device and
_get_packing_format; transformers, utils/quantization_config.py, AutoRoundConfig.
"""

from collections.abc import Mapping
from typing import Any

from qtoolkit.checkpoints.layouts import _awq, _gptq
from qtoolkit.checkpoints.layouts._encoding import Encoding
from qtoolkit.checkpoints.layouts._headers import Headers
from qtoolkit.checkpoints.layouts._layout import Layout

METHOD = "auto-round"
# The version of GPTQ, or "" of AutoAWQ, by packing format.
_VERSIONS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "",
    "auto_round:awq": "",
}


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    if not config:  # the readers of GPTQ and AutoAWQ say what is missing
        return {}
    # Old versions call it "backend". transformers takes "auto_round:gptq" if there is neither.
    packing = config.get("packing_format") or config.get("backend") or "auto"
    data_type = str(config.get("data_type") or "int")
    if packing not in _VERSIONS or not data_type.startswith("int"):
        key = "packing_format" if packing not in _VERSIONS else "data_type"
        known = ", ".join(_VERSIONS) if packing not in _VERSIONS else "int"
        raise headers.config_error(key, packing if key != "data_type" else data_type, known)
    others = config.get("extra_config")
    plain = {"sym": config.get("sym"), "group_size": config.get("group_size")}
    if version := _VERSIONS[packing]:
        return _gptq.decode({**plain, "checkpoint_format": version, "dynamic": others}, headers)
    is_same = not others and plain["group_size"]
    groups = {"group_size": plain["group_size"]} if is_same else {}
    return _awq.decode({"version": "gemm", **groups}, headers)


LAYOUT = Layout(
    name="auto-round",
    title="that of AutoRound: entries of GPTQ or AutoAWQ",
    loaders="transformers with auto-round; by their documentation (untested): vLLM, SGLang",
    decode=decode,
    methods=(METHOD, "intel/auto-round"),
)
