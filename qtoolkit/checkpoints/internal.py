"""What the packages above `checkpoints` use of it beside its public names. No JAX here."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.checkpoints._base import Source, StoredAs
from qtoolkit.checkpoints._container import Destination, check_holds, layout_in
from qtoolkit.checkpoints._dequantized import check_quantized, dequantized
from qtoolkit.checkpoints._header import MisuseError, listed, shown
from qtoolkit.checkpoints._limits import byte_count, file_limit, worker_count
from qtoolkit.checkpoints._parts import part_names
from qtoolkit.checkpoints._place import WHOLE, whole
from qtoolkit.checkpoints._plan import ContainerName
from qtoolkit.checkpoints._planner import compiled
from qtoolkit.checkpoints._roles import AxisChoice
from qtoolkit.checkpoints._safetensors import check_target
from qtoolkit.checkpoints._source import Folder, read_json
from qtoolkit.checkpoints._statistics import Statistics, statistics
from qtoolkit.checkpoints._storage import join
from qtoolkit.checkpoints._stored import Stored
from qtoolkit.checkpoints._targets import resolve_target, target_names
from qtoolkit.checkpoints.layouts import SCALINGS
