"""Operators of OpenVINO: FakeConvert-13, ConvertPromoteTypes-14, Range-4 and Convert-1.

Element types go by OpenVINO's names: "f8e4m3", "boolean", "i4", "u64". Errors say what the
operators' own checks say.
"""

from qtoolkit._names import hint_at_names
from qtoolkit.openvino._convert import convert
from qtoolkit.openvino._fake_convert import fake_convert
from qtoolkit.openvino._promote import convert_promote_types, promoted_type
from qtoolkit.openvino._range import range

__all__ = ["convert", "convert_promote_types", "fake_convert", "promoted_type", "range"]

hint_at_names(__name__)
