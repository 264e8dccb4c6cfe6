"""Computes the matmuls of a `Program` by recipes, with the state that is planted for each."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qtoolkit.formats import Rules
from qtoolkit.products._calls import hashes
from qtoolkit.products._joined import JOINED, with_joined_scales
from qtoolkit.products._learned import with_first_scales
from qtoolkit.products._lookups import Lookup
from qtoolkit.products._matmul import SCALED, Call, Key, Matmul, Planted, matching
from qtoolkit.products._observed import observed
from qtoolkit.products._origins import Parameter, following_features
from qtoolkit.products._place import MODEL
from qtoolkit.products._plan import State
from qtoolkit.products._product import quantized_product
from qtoolkit.products._program import Program
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._states import HISTORY, KEY, STEP, moved, state_of
from qtoolkit.products._taps import Seen, Tap
from qtoolkit.scaling import QArray

BY_RULE, BY_RECIPE = "excluded by a rule", "unquantized by the recipe"
INTEGERS = "integers are not rounded"
COMPLEX = "complex numbers are not rounded: multiply real and imaginary parts"
DERIVATIVE = "part of a derivative that the model itself takes"
SCALES = "its operands are rounded already"
OUTSIDE = "computed by itself, in no wrapped layer"


class Module(NamedTuple):
    """What rules match of a module.

    Attributes:
      paths: "blocks/0/mlp"; several if it is shared; "" for the model itself.
      kinds: Its type and the types of the modules around it.
      computes_unquantized: Whether all matmuls that it computes itself stay in high precision.
      rules: Those of a part that was wrapped by itself; None for those of the model.
    """

    paths: tuple[str, ...]
    kinds: tuple[type, ...]
    computes_unquantized: bool = False
    rules: Rules[Recipe] | None = None

    def with_path_of(self, parameter: Parameter | None) -> "Module":
        """The same with the paths of a parameter, which rules may name, too."""
        if parameter is None:
            return self
        own = (parameter._replace(path=path).full_path for path in self.paths)
        return self._replace(paths=(*self.paths, *own))


@dataclasses.dataclass(frozen=True, eq=False)
class Quantizing:
    """A `multiply` for `Program.run`: each matmul by its recipe.

    Attributes:
      rules: The recipes.
      modules: The modules of the model, by path.
      moves: Whether the caller stores the state after the call.
      observes: Whether a training step tells the magnitudes by itself, as it does unless somebody
        differentiates by probes.
      rng: uint32[2], words of a random key for this call, in place of keys in the state.
      tap: What to measure of a matmul for which zeros are planted.
      is_measured: Whether this is no call of the model, but measures it: it is quantized as after
        its warm-up, and learned scales that were not started are those of this batch.
    """

    rules: Rules[Recipe]
    modules: Mapping[str, Module]
    moves: bool = True
    observes: bool = True
    rng: jax.Array | None = None
    tap: Tap | None = None
    is_measured: bool = False

    def recipe_of(self, matmul: Matmul) -> Recipe | None:
        """The recipe of a matmul; None if it stays as it is, see `reason_of`."""
        return None if self._kept_by(matmul) else self._by_rules(matmul)

    def reason_of(self, matmul: Matmul) -> str:
        """Why a matmul stays as it is; "" if it has a recipe."""
        is_of_model = matmul.module is not None and bool(self.modules)
        by_rules = BY_RULE if is_of_model and self._by_rules(matmul) is None else ""
        return by_rules or self._kept_by(matmul)

    def _kept_by(self, matmul: Matmul) -> str:
        running = self.modules.get(matmul.module or "")
        dtypes = [x.dtype for x in matmul.types[:2]]
        if matmul.primitive == SCALED:
            return SCALES
        if matmul.around:
            return f"inside of {matmul.around}: call qtoolkit.dot_general there, with a recipe"
        if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
            return COMPLEX
        if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
            return INTEGERS
        if matmul.is_derivative:
            return DERIVATIVE
        if matmul.module is None or matmul.function is None:
            return OUTSIDE
        if running is not None and running.computes_unquantized:
            return BY_RULE
        return ""

    def _by_rules(self, matmul: Matmul) -> Recipe | None:
        return self._recipe(self._module_of(matmul), matmul.parameter)

    def _module_of(self, matmul: Matmul) -> Module:
        module, running = self.module_at(matmul.path), self.modules.get(matmul.module or "")
        if matmul.path not in self.modules and running is not None:
            # Equal modules under `nn.jit` share one trace, in which the first of them runs.
            module = module._replace(kinds=(*running.kinds, *module.kinds))
        return module

    def by_rules(self, path: str, parameter: Parameter | None) -> Recipe | None:
        """The recipe of matmuls with a parameter of a module, or of two activations in it."""
        return self._recipe(self.module_at(path), parameter)

    def _recipe(self, module: Module, parameter: Parameter | None) -> Recipe | None:
        recipe = self._lookup(module.with_path_of(parameter))
        return recipe.of_activations() if recipe is not None and parameter is None else recipe

    def deciding_rules(self, program: Program) -> set[tuple[Rules[Recipe], int | None]]:
        """The rules, and the places in them, that decide the matmuls and look-ups of modules."""
        uses = [(self._module_of(x), x.parameter) for x in program.matmuls if x.module is not None]
        uses += [(self.module_at(x.parameter.path), x.parameter) for x in program.lookups]
        named = [module.with_path_of(parameter) for module, parameter in uses]
        return {(self._rules_of(x), self._rules_of(x).match_index(x.paths, x.kinds)) for x in named}

    def recipe_of_rows(self, lookup: Lookup) -> Recipe | None:
        """The recipe by which a look-up rounds the rows; None if they stay as they are."""
        recipe = self.by_rules(lookup.parameter.path, lookup.parameter)
        return recipe if recipe is not None and recipe.lookups else None

    def of_module(self, path: str) -> Recipe | None:
        """The recipe of a module."""
        return self._lookup(self.module_at(path))

    def _lookup(self, module: Module) -> Recipe | None:
        return self._rules_of(module).lookup(module.paths, module.kinds)

    def _rules_of(self, module: Module) -> Rules[Recipe]:
        return self.rules if module.rules is None else module.rules

    def module_at(self, path: str) -> Module:
        """The module of a path, or what the nearest module around tells of it."""
        around = path
        while around and around not in self.modules:
            around = around.rpartition("/")[0]
        module, rest = self.modules.get(around, Module((), ())), path[len(around) :].strip("/")
        within = tuple(f"{one}/{rest}".strip("/") for one in module.paths)
        return module._replace(paths=within or (path,), computes_unquantized=False)

    def __call__(
        self, matmul: Matmul, call: Call, planted: Planted | None
    ) -> tuple[Any, Seen | None]:
        recipe = self.recipe_of(matmul)
        if recipe is None or not (any(recipe.operands) or self.tap or matmul.is_stored):
            return None, None
        return self.product(matmul, call, recipe, planted)

    def product(
        self, matmul: Matmul, call: Call, recipe: Recipe, planted: Planted | None
    ) -> tuple[jax.Array, Seen | None]:
        """The result of a matmul by a recipe, and what a training step sees of it."""
        is_swapped = matmul.kernel == 0
        operands = (call.rhs, call.lhs) if is_swapped else (call.lhs, call.rhs)
        kept, seen = {} if planted is None else dict(planted.arrays), None
        joined = kept.pop(JOINED, None)
        if self.is_measured:
            recipe = dataclasses.replace(recipe, warm_up=0)
            kept = with_first_scales(kept, operands, recipe)
        is_learned = recipe.learned[1] and isinstance(operands[1], QArray)
        if matmul.is_stored and not is_learned:  # `quantized_product` takes care of learned ones
            recipe = recipe.with_stored(1)
        if not kept and self.rng is None:
            if recipe.is_delayed or recipe.warm_up:
                observed({}, *operands, recipe, moves=False)
            recipe = recipe.without_state()
        elif self.observes and any(part in kept for part in (HISTORY, KEY, STEP)):
            kept, histograms = observed(kept, *operands, recipe, moves=self.moves)
            seen = Seen(total=histograms)
        state = state_of(recipe, f"{matmul.path}:{matmul.name}", kept, self.rng)
        if joined is not None:
            state = (state or State())._replace(joined=(None, jnp.max(joined)))
        tap = None
        if self.tap is not None and planted is not None and planted.shared is not None:
            tap, state = self.tap, (state or State())._replace(zeros=planted.shared)
        assert matmul.function is not None
        with jax.named_scope(matmul.path or MODEL):  # for profilers: nothing of ours reads it
            out = quantized_product(
                f"{matmul.primitive} of {matmul.path}" if matmul.path else matmul.primitive,
                matmul.function,
                call.lhs,
                call.rhs,
                following_features(recipe, matmul.operands),
                matmul.result.dtype,
                state,
                call.extra,
                tap=tap,
                is_swapped=is_swapped,
            )
        return out, seen

    def run(
        self, program: Program, inputs: Any, planted: Mapping[Key, Planted]
    ) -> tuple[list[Any], dict[Key, dict[str, Any]]]:
        """The results of a program, flat, and the states of its matmuls after a training step.

        Args:
          planted: By the keys of states, see `matching`.
        """
        outs, seen = program.run(inputs, self, self.replanted(program, inputs, planted))
        new = {}
        for matmul, recipe, key in self.uses_of_states(program, planted):
            if self.moves and matmul.key in seen:
                total = seen[matmul.key].total
                new[key] = moved(planted[key].arrays, total, recipe.delayed)
        return outs, new

    def uses_of_states(
        self, program: Program, states: Collection[Key]
    ) -> list[tuple[Matmul, Recipe, Key]]:
        """The matmuls that use known states, each with its recipe and the key of the state."""
        known = matching(program.matmuls, states)
        pairs = ((x, self.recipe_of(x)) for x in program.matmuls if x.key in known)
        return [(x, recipe, known[x.key]) for x, recipe in pairs if recipe is not None]

    def replanted(
        self, program: Program, inputs: Sequence[Any], planted: Mapping[Key, Planted]
    ) -> dict[Key, Planted]:
        """What is planted for each matmul, by its key, from the same by the keys of states."""
        known = matching(program.matmuls, planted)
        found = {key: planted[state] for key, state in known.items()}
        return with_joined_scales(program, inputs, found, self.recipe_of)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of a model that can be traced to a program: a static argument of `jax.jit`.

    Attributes:
      function: See `Program.of`. It hashes.
      rules, modules: Of the model, see `Quantizing`. These and `parameters` follow from `function`.
      parameters: For each input its name, if it is a parameter.
    """

    function: Callable[[list[Any]], tuple[Any, Any]]
    rules: Rules[Recipe] = dataclasses.field(compare=False)
    modules: Mapping[str, Module] = dataclasses.field(compare=False)
    parameters: tuple[Parameter | None, ...] = dataclasses.field(compare=False)

    def program(self, leaves: list[Any], axes: Sequence[tuple[str, int]] = ()) -> Program:
        rows = self.quantizing().recipe_of_rows
        return Program.of(self.function, leaves, self.parameters, axes, rows)

    def quantizing(self, **options: Any) -> Quantizing:
        return Quantizing(self.rules, self.modules, **options)

    def measuring(
        self, leaves: list[Any], planted: Mapping[Key, Planted], tap: Tap | None = None
    ) -> tuple[Program, Quantizing, dict[Key, Planted]]:
        """For who measures the model: a program, its `multiply`, what is planted for matmuls."""
        program = self.program(leaves)
        multiply = self.quantizing(observes=False, is_measured=True, tap=tap)
        return program, multiply, multiply.replanted(program, leaves, planted)


def stored_labels(matmul: Matmul) -> tuple[str, str]:
    """How reports name (input, kernel) if they are stored as codes; "" for arrays."""
    kernel = matmul.kernel
    return "", "" if kernel is None else matmul.origins[kernel].stored


@jax.tree_util.register_static
class StaticResult:
    """Static data among the results of a jitted function."""

    def __init__(self, value: Any) -> None:
        self.value = value


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of a `Traced` and arrays, unless the model cannot be a key of JAX."""
    jitted = jax.jit(function, static_argnums=0)

    @functools.wraps(function)
    def run(traced: Traced, *arrays: Any) -> Any:
        return (jitted if hashes(traced) else function)(traced, *arrays)

    return run
