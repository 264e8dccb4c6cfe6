"""What the packages above need of scaling and users do not: the engine that quantizes."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.scaling._awq import awq_factors
from qtoolkit.scaling._blocks import (
    Blocks,
    TornBlocksError,
    blocks_of,
    check_axes,
    explicit_spec,
    largest_magnitude,
    magnitude_max,
)
from qtoolkit.scaling._contraction import Contraction, along_contracted, check_inputs
from qtoolkit.scaling._elements import Scales, element_values
from qtoolkit.scaling._engine import (
    block_codes,
    block_values,
    dequantized,
    may_overflow,
    operand_codes,
    operand_values,
    scaled_values,
    single_scale,
    unscaled_values,
)
from qtoolkit.scaling._error_sums import (
    SlabSums,
    WeightErrors,
    error_sums,
    slab_errors,
    slab_sums,
    weight_errors,
)
from qtoolkit.scaling._find_scales import find_scales, finite_range
from qtoolkit.scaling._hadamard import computed_now
from qtoolkit.scaling._history import (
    BAD_BUCKET,
    BUCKETS,
    FAR,
    amax_of,
    amax_to_keep,
    histogram,
    updated_history,
)
from qtoolkit.scaling._input_transform import InputTransform
from qtoolkit.scaling._metrics import occurrences
from qtoolkit.scaling._observer import Observer, observed_summary
from qtoolkit.scaling._quantize import check_quantize
from qtoolkit.scaling._scales import (
    asymmetric,
    effective_scale,
    power_above,
    scale_from,
    tensor_scale_from,
    unclamped_range,
)
from qtoolkit.scaling._smoothing import smoothing_factors
from qtoolkit.scaling._tally import (
    LOWEST_EXPONENT,
    TALLY_SHAPES,
    TALLY_SIZE,
    Tally,
    extreme,
    magnitude_marks,
    marks_size,
    tally_of,
    tally_vector,
)
