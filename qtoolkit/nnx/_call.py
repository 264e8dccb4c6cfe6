"""A call of a wrapped model: traced to a program, and computed with quantized matmuls.

`wrap` gives each module a subclass of the same name. Its public methods begin a program if nothing
around them has; in a program they only say in which module they run. The program gets copies of the
modules without the state of matmuls, which is planted and written here, after the call.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from qtoolkit.formats import Rules
from qtoolkit.nnx._function import (
    PRODUCTS,
    Function,
    Site,
    finished,
    is_node,
    site_of,
    sites_in,
)
from qtoolkit.nnx._state import ProductState, product_states
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    NEEDS_NUMBERS,
    Key,
    MeasuredStep,
    Module,
    NoMatmulsError,
    Parameter,
    Planted,
    RunsLaterError,
    StaticResult,
    Traced,
    hashes,
    in_module,
    is_eager,
    is_step_by_step,
    is_whole,
    needs_numbers,
    planted_with,
    remembering_no_matmuls,
    runs_step_by_step,
    step_of,
    with_numbers,
)


def entered(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs as a program; in one, it says where it runs."""

    @functools.wraps(method)
    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        site = site_of(self)
        if site is None:
            return method(self, *args, **kwargs)
        if site.is_inside:
            with in_module(site.path):
                return method(self, *args, **kwargs)
        try:
            return _traced_call(method, (self, args, kwargs))
        except NoMatmulsError:
            return method(self, *args, **kwargs)
        except NEEDS_NUMBERS as error:
            if not is_eager((args, kwargs)):
                raise
            _explain_numbers(method, self, error)
            return method(self, *args, **kwargs)
        except RunsLaterError:
            if not is_step_by_step():
                raise
            return method(self, *args, **kwargs)

    return entering


def _traced_call(method: Callable[..., Any], arguments: Any) -> Any:
    def call(traces_numbers: bool) -> Any:
        return Bound(method, arguments, traces_numbers=traces_numbers).call()

    def has_numbers() -> bool:
        leaves = jax.tree.leaves(arguments, is_leaf=is_node)
        return any(is_whole(x) or type(x) is float for x in leaves)

    return with_numbers(call, has_numbers)


def _explain_numbers(method: Callable[..., Any], module: Any, error: Exception) -> None:
    """Raises for `__call__`. Another method may run step by step: the modules in it are wrapped."""
    what = (
        f"{type(module).__name__}.{method.__name__} needs the numbers of an array, which a wrapped "
        "model does not have while its call is traced, as under nnx.jit"
    )
    if method.__name__ == "__call__" and not is_step_by_step():
        raise needs_numbers(what, error) from error
    params = (x.get_value() for x in vars(module).values() if isinstance(x, nnx.Param))
    runs_step_by_step(what, any(len(getattr(x, "shape", ())) > 1 for x in params))


@remembering_no_matmuls
@functools.partial(jax.jit, static_argnums=(0, 1))
def _jitted(traced: Traced, moves: bool, leaves: Any, planted: Any) -> Any:
    outs, codes, static, new = _run(traced, moves, leaves, planted)
    return outs, codes, StaticResult(static), new


def _run(traced: Traced, moves: bool, leaves: Any, planted: Any) -> Any:
    """The arrays of the result, see `Program.codes`, the rest of it, and new states of matmuls."""
    program = traced.program(leaves)
    if program.is_as_written:
        raise NoMatmulsError
    is_ours, measured = step_of("nnx")
    tap = None if measured is None else measured.tap
    multiply = traced.quantizing(moves=moves and not is_ours, observes=not is_ours, tap=tap)
    outs, new = multiply.run(program, leaves, planted)
    used = tuple(key for _, _, key in multiply.uses_of_states(program, planted))
    return outs, program.codes(leaves), (program.static, used), new


class Bound:
    """A method or a function of a model, with its arguments.

    Attributes:
      traced, leaves: The function of arrays, and the arrays.
      states: The states of its matmuls.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Any,
        *,
        is_method: bool = True,
        traces_numbers: bool = True,
    ) -> None:
        self.arguments = arguments
        pure, self.nodes, variables, arrays = Function.of(
            function, arguments, is_method=is_method, traces_numbers=traces_numbers
        )
        modules = _Modules(self.nodes)
        self.states = modules.states
        pairs = zip(pure.paths, variables, strict=True)
        parameters = [
            modules.parameter(path) if isinstance(variable, nnx.Param) else None
            for path, (variable, leaves) in pairs
            for _ in leaves
        ]
        self.leaves = [*(leaf for _, leaves in variables for leaf in leaves), *arrays]
        unknown = len(self.leaves) - len(parameters)
        names = (*parameters, *(None,) * unknown)
        self.traced = Traced(pure, modules.rules, modules.by_path, names)

    def planted(self, zeros: Mapping[Key, Any] | None = None) -> dict[Key, Planted]:
        """What the matmuls are given. `zeros`: for what a training step measures, by matmul."""
        states = {key: kept.arrays for key, kept in self.states.items()}
        return planted_with(states, {} if zeros is None else zeros)

    def call(self) -> Any:
        """Calls the method. Writes what it changes, and the new states of matmuls."""
        _, measured = step_of("nnx")
        zeros = None if measured is None else measured.zeros_in(_around(self.nodes[0], measured))
        planted = self.planted(zeros)
        moves = all(kept.is_writable for kept in self.states.values())
        given = self.traced, moves, self.leaves, planted
        if is_eager(self.leaves) and hashes(self.traced):
            outs, codes, known, new = _jitted(*given)
            static, used = known.value
        else:
            outs, codes, (static, used), new = _run(*given)
        for key in used:
            if key in self.states:  # else zeros were planted alone
                self.states[key].check_started()
        for key, state in new.items():
            self.states[key].write(state)
        return finished(static, outs, codes, self.nodes, self.arguments)


def _around(module: nnx.Module, measured: MeasuredStep) -> str:
    """Where in the model of a training step the wrapped model of a module stands."""
    sites = (site.around for site, x in sites_in(measured.model) if x is module)
    return next(sites, "")


class _Modules:
    """The modules among the nodes of a call.

    Attributes:
      rules: Of the model that is called.
      by_path: What rules match of each, by its path in the model.
      states: The states of matmuls.
    """

    def __init__(self, nodes: Any) -> None:
        modules = [(path, x) for path, x in nnx.iter_modules(nodes, graph=True)]
        modules = [(path, x) for path, x in modules if PRODUCTS not in path]
        modules.sort(key=lambda item: len(item[0]))
        sites = (site_of(module) for _, module in modules)
        first = next((site for site in sites if site is not None), None)
        self.rules: Rules[Recipe] = Rules([]) if first is None else first.rules
        self.by_path: dict[str, Module] = {}
        self.states: dict[Key, ProductState] = {}
        self._sites: dict[tuple[Any, ...], Site] = {}
        if first is None:  # a report of a plain model names its parameters, too
            self._sites[0,] = Site(("",), (), self.rules)
            return
        for path, module in modules:
            site = site_of(module) or self._made_later(path, module)
            if site is None:
                continue
            site = self._sites[tuple(path)] = site.at(path)
            is_left = isinstance(module, nnx.SpectralNorm)
            own = None if site.rules == self.rules else site.rules
            for one in site.paths:
                shown = f"{site.around}/{one}".strip("/")
                self.by_path[shown] = Module(site.paths, site.kinds, is_left, own)
            for name, kept in product_states(module).items():
                self.states[Key(site.path, name)] = kept

    def _made_later(self, path: Any, module: Any) -> Site | None:
        """The site of a module that was put into the model after `wrap`."""
        around, rest = self._nearest(path)
        if around is None:
            return None
        shown = "/".join(filter(None, (around.paths[0], *map(str, rest))))
        return dataclasses.replace(around, paths=(shown,), kinds=(type(module), *around.kinds))

    def _nearest(self, path: Any) -> tuple[Site | None, Any]:
        for end in range(len(path), -1, -1):
            if site := self._sites.get(tuple(path[:end])):
                return site, path[end:]
        return None, path

    def parameter(self, path: Any) -> Parameter | None:
        """The name of the parameter at a path of the nodes; None if no wrapped module has it."""
        if PRODUCTS in path:
            return None
        site, rest = self._nearest(path)
        return None if site is None else Parameter(site.path, ".".join(map(str, rest)))


def bound_function(function: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Bound:
    """A function that calls a model, such as a loss, as a program."""
    return Bound(function, (model, tuple(args), dict(kwargs)), is_method=False)


def call_model(model: Any, *args: Any, method: Any = "__call__", **kwargs: Any) -> Any:
    return getattr(model, method)(*args, **kwargs)
