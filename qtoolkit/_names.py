"""What to write instead of a name that a module does not have."""

import sys

# Names that people write for others, or look for in another package.
_MEANT = {
    **dict.fromkeys(
        ("wrap", "report", "value_and_grad", "numerics"), ("qtoolkit.nnx.{}", "qtoolkit.linen.{}")
    ),
    **dict.fromkeys(("convert", "load", "save"), ("qtoolkit.checkpoints.{}",)),
    **dict.fromkeys(("lsq", "lsq_plus"), ("qtoolkit.gradients.{}",)),
    **dict.fromkeys(("dot", "matmul"), ("qtoolkit.dot_general", "qtoolkit.einsum")),
}


def unknown(module: str, name: str) -> AttributeError:
    """The error for a name that `module` does not have, with those that may be meant."""
    import difflib  # here, so that `import qtoolkit` is quick

    names = [n for n in vars(sys.modules[module]).get("__all__", ()) if n[0] != "_"]
    top = vars(sys.modules["qtoolkit"]).get("_ALL", ())
    meant = [place.format(name) for place in _MEANT.get(name, ())]
    if module != "qtoolkit" and name in top:
        meant = [f"qtoolkit.{name}"]
    if not meant and not name.startswith("_"):
        close = [n for n in names if len(n) > 3 and name.startswith(f"{n}_")]
        close += difflib.get_close_matches(name, names, n=3)
        meant = [f"{module}.{n}" for n in dict.fromkeys(close)]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def hint_at_names(module: str) -> None:
    """Let `unknown` say what a misspelled name of this module may mean.

    A `__getattr__` that type checkers saw would make them accept every misspelled name.
    """

    def missing(name: str) -> object:
        raise unknown(module, name)

    vars(sys.modules[module])["__getattr__"] = missing
