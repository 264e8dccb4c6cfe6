"""What the packages above `checkpoints` use of it, besides its public names. No JAX here."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.checkpoints._arguments import PlanOptions
from qtoolkit.checkpoints._cautions import ASK_FOR_WEIGHTS, CAUTIONS, PACKED_OPTION, TRIED
from qtoolkit.checkpoints._checkpoint import Checkpoint
from qtoolkit.checkpoints._checks import compile_pattern
from qtoolkit.checkpoints._containers import open_source
from qtoolkit.checkpoints._decode import check_explained, decode_quantized, decode_weights
from qtoolkit.checkpoints._folder import read_json
from qtoolkit.checkpoints._formats import (
    format_names,
    safetensors_dtype,
    scheme_named,
    weight_format,
)
from qtoolkit.checkpoints._gguf_write import OWN_TYPES, check_container, plan_for
from qtoolkit.checkpoints._plan import make_plan
from qtoolkit.checkpoints._roles import AxisChoice
from qtoolkit.checkpoints._safetensors import in_data_order, write_safetensors
from qtoolkit.checkpoints._storage import join
from qtoolkit.checkpoints._target import (
    Destination,
    byte_count,
    file_limit,
    files_of_shard,
    worker_count,
)
from qtoolkit.checkpoints._tensors import MisuseError, listed, shown
from qtoolkit.checkpoints._writing import COMPLETE, noting_complete
from qtoolkit.checkpoints.layouts import LAYOUTS, SCALINGS, WRITTEN, Encoding, Headers, Layout
