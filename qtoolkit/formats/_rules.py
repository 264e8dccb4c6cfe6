"""`Rules`: which value applies to which path or class. No JAX here."""

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from qtoolkit.formats._format import format
from qtoolkit.formats._names import Format

Value = TypeVar("Value")
Other = TypeVar("Other")

Key = str | type
Pairs = Mapping[Any, Value | None] | Iterable[tuple[Key, Value | None]]


@dataclasses.dataclass(frozen=True, init=False)
class Rules(Generic[Value]):
    """An ordered list of rules, of which the first that matches decides. Frozen, hashable data.

    The values are formats for checkpoint conversion, recipes for `nnx.wrap`. With
    the value None a rule excludes what it matches.

        Rules({"(^|/)head/": None, "mlp/.*kernel$": "e4m3fn", nnx.Conv: "e5m2"}, default="bfloat16")

    Attributes:
      rules: (key, value) pairs. A string is a regular expression that is searched in paths such as
        "blocks/0/mlp/kernel"; a class matches its instances and those of subclasses.
      default: The value where no rule matches.

    Examples:
      >>> rules = qt.Rules({"(^|/)head/": None, "mlp/.*kernel$": "e4m3fn"}, default="bfloat16")
      >>> [rules.lookup(path) for path in ("head/kernel", "0/mlp/up/kernel", "0/mlp/up/bias")]
      [None, 'e4m3fn', 'bfloat16']
    """

    rules: tuple[tuple[Key, Value | None], ...]
    default: Value | None
    _patterns: tuple[re.Pattern[str] | None, ...] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    def __init__(self, rules: Pairs[Value], default: Value | None = None) -> None:
        """From pairs, or a mapping in its order.

        Raises:
          ValueError: An invalid regular expression, or a key that comes twice.
          TypeError: A key is neither a string nor a class, or a value is not hashable.
        """
        pairs = _pairs(rules)
        keys = [key for key, _ in pairs]
        for key, value in pairs:
            _check_hashable(_key_text(key), value)
            if keys.count(key) > 1:
                raise ValueError(
                    f"Rules: {_key_text(key)} comes twice; the second would never decide"
                )
        _check_hashable("default", default)
        object.__setattr__(self, "rules", pairs)
        object.__setattr__(self, "default", default)
        object.__setattr__(self, "_patterns", tuple(map(_pattern, keys)))

    def match_index(
        self, path: str | Sequence[str], kind: type | Sequence[type] | None = None
    ) -> int | None:
        """Position of the first rule that matches, None where none does.

        Args:
          path: The path; or all paths of a shared object, of which one must match.
          kind: The type of the object; or several, of which one must match.
        """
        paths, kinds = _as_sequences(path, kind)
        for position in range(len(self.rules)):
            if self._matches(position, paths, kinds):
                return position
        return None

    def lookup(
        self, path: str | Sequence[str], kind: type | Sequence[type] | None = None
    ) -> Value | None:
        """The value of the first rule that matches, else the default; see `match_index`."""
        position = self.match_index(path, kind)
        return self.default if position is None else self.rules[position][1]

    def unused(
        self,
        paths: Iterable[str | Sequence[str]],
        kinds: Iterable[type | Sequence[type] | None] | None = None,
    ) -> tuple[Key, ...]:
        """Keys of the rules that match nothing, most likely because they are misspelt.

        A rule counts as used where it matches, even if an earlier one decides.

        Args:
          paths: All paths, each as in `match_index`.
          kinds: The types of the same objects, in the same order; None if types do not matter.
        """
        pairs = ((p, None) for p in paths) if kinds is None else zip(paths, kinds, strict=True)
        objects = [_as_sequences(path, kind) for path, kind in pairs]
        return tuple(
            key
            for position, (key, _) in enumerate(self.rules)
            if not any(self._matches(position, *each) for each in objects)
        )

    def check_used(
        self,
        where: str,
        paths: Iterable[str | Sequence[str]],
        kinds: Iterable[type | Sequence[type] | None] | None = None,
    ) -> None:
        """Raise ValueError with the keys of `unused`, if there are any.

        Args:
          where: The calling function, for the message.
          paths, kinds: As in `unused`.
        """
        paths = list(paths)
        unused = self.unused(paths, kinds)
        if not unused:
            return
        names = [path if isinstance(path, str) else path[0] for path in paths]
        names = [name or "'' (the whole)" for name in names]
        close = [
            name
            for key in unused
            if isinstance(key, str)
            for name in difflib.get_close_matches(key, names, n=1)
        ]
        names = [*close, *(name for name in names if name not in close)]
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ValueError(
            f"{where}: {', '.join(map(_key_text, unused))} matches nothing, expected every rule to "
            f"match something; there is {some or 'nothing'}"
        )

    def map(self, function: Callable[[Value], Other | None]) -> "Rules[Other]":
        """The same rules with `function` of each value that is not None.

        Raises:
          TypeError, ValueError: What `function` raises, after the name of the rule.
        """

        def mapped(where: str, value: Value | None) -> Other | None:
            try:
                return None if value is None else function(value)
            except TypeError as error:
                raise TypeError(f"Rules: {where}: {error}") from error
            except ValueError as error:
                raise ValueError(f"Rules: {where}: {error}") from error

        return Rules(
            [(key, mapped(_key_text(key), value)) for key, value in self.rules],
            mapped("default", self.default),
        )

    def to_json(self) -> str:
        """Rules of formats as text: {"default": null, "rules": [["kernel$", "e4m3fn"], ...]}.

        `Rules.from_json(rules.to_json()) == rules.map(qtoolkit.format)`.

        Raises:
          TypeError: A key is a class, or a value is a format that `qtoolkit.format` does not find
            by its name, such as one of your own; the message names the rule.
          ValueError: A value is a string that names no format.
        """
        for key, _ in self.rules:
            if not isinstance(key, str):
                raise TypeError(
                    f"Rules: {_key_text(key)} is a class, which JSON cannot hold; expected a "
                    "regular expression"
                )
        names = self.map(_name_that_round_trips)
        return json.dumps({"rules": names.rules, "default": names.default}, sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> "Rules[Format]":
        """Rules of formats from text that `to_json` wrote; "default" is optional.

        Raises:
          ValueError: The text is something else, a regular expression is invalid, or no format has
            one of the names; the message names the rule.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Rules: invalid JSON ({error}); {_EXPECTED}") from error
        if not (
            isinstance(data, dict)
            and data.keys() <= {"rules", "default"}
            and isinstance(data.get("rules"), list)
            and all(isinstance(rule, list) and len(rule) == 2 for rule in data["rules"])
            and all(isinstance(key, str) for key, _ in data["rules"])
            and all(
                value is None or isinstance(value, str)
                for value in (data.get("default"), *(value for _, value in data["rules"]))
            )
        ):
            raise ValueError(f"Rules: {_EXPECTED}")
        return Rules([(key, value) for key, value in data["rules"]], data.get("default")).map(
            format
        )

    def _matches(self, position: int, paths: Sequence[str], kinds: Sequence[type]) -> bool:
        key, pattern = self.rules[position][0], self._patterns[position]
        if pattern is None:
            assert isinstance(key, type)
            return any(issubclass(kind, key) for kind in kinds)
        return any(pattern.search(path) for path in paths)


_EXPECTED = (
    'expected {"rules": [[REGEX, NAME], ...], "default": NAME}, each NAME a format or null, e.g. '
    '{"rules": [["(^|/)head/", null], ["kernel$", "e4m3fn"]]}'
)


def values_of_rules(rules: Rules[Value]) -> list[Value]:
    """All that a lookup may give, the default first."""
    values = [rules.default, *(value for _, value in rules.rules)]
    return [value for value in values if value is not None]


def _pairs(rules: Any) -> tuple[tuple[Key, Any], ...]:
    try:
        if isinstance(rules, str):
            raise TypeError
        items = rules.items() if isinstance(rules, Mapping) else rules
        pairs = tuple((key, value) for key, value in items)
    except (TypeError, ValueError):
        raise TypeError(
            f"Rules: got {rules!r}, expected a mapping or (key, value) pairs, each key a regular "
            "expression or a class"
        ) from None
    for key, _ in pairs:
        if not isinstance(key, str | type):
            raise TypeError(
                f"Rules: key {key!r} has type {type(key).__name__}, expected a string (a regular "
                "expression; flags such as (?i) go into it) or a class"
            )
    return pairs


def _check_hashable(where: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"Rules: {where}: value of type {type(value).__name__} is not hashable, expected "
            "frozen data"
        ) from None


def _pattern(key: Key) -> re.Pattern[str] | None:
    if isinstance(key, type):
        return None
    try:
        return re.compile(key)
    except re.error as error:
        raise ValueError(
            f"Rules: {_key_text(key)}: invalid regular expression ({error}), expected one such as "
            r"'(^|/)head/'; write special characters with a backslash"
        ) from error


def _key_text(key: Key) -> str:
    return f"rule {key.__name__ if isinstance(key, type) else ascii(key)}"


def _as_sequences(
    path: str | Sequence[str], kind: type | Sequence[type] | None
) -> tuple[Sequence[str], Sequence[type]]:
    paths = (path,) if isinstance(path, str) else tuple(path)
    return paths, () if kind is None else (kind,) if isinstance(kind, type) else tuple(kind)


def _name_that_round_trips(value: Any) -> str:
    fmt = format(value)
    try:
        round_trips = format(fmt.name) == fmt
    except ValueError:
        round_trips = False
    if not round_trips:
        raise TypeError(
            f"{value!r} cannot be written as text: qtoolkit.format does not find it by its name "
            f"{fmt.name!r}; expected a format that ships"
        )
    return fmt.name
