"""What a manifest must state: tables of names and of what each may be, so that no reader trusts a damaged file."""

import re
from collections.abc import Callable

Rule = Callable[[object], bool]


def whole(least: int, most: int = 2**63 - 1) -> Rule:
    """A whole number in a range."""
    return lambda value: type(value) is int and least <= value <= most


def whole_or_null(least: int) -> Rule:
    """A whole number from `least` on, or null."""
    return lambda value: value is None or whole(least)(value)


def flag(value: object) -> bool:
    """True or false."""
    return type(value) is bool


def share(value: object) -> bool:
    """A number above 0 and at most 1."""
    return type(value) in (int, float) and 0 < value <= 1


def number(least: float, most: float) -> Rule:
    """A number in a range."""
    return lambda value: type(value) in (int, float) and least <= value <= most


def text(pattern: str = r"(?s).+") -> Rule:
    """A string of which the whole matches."""
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def one_of(*values: str) -> Rule:
    """One of some strings."""
    return lambda value: isinstance(value, str) and value in values


def list_of(rule: Rule, least: int = 0) -> Rule:
    """A list of at least so many entries that each obey a rule."""
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(rule, value))


def optional(rule: Rule) -> Rule:
    """What obeys a rule, or null, or nothing at all."""
    return lambda value: value is None or rule(value)


def values_of(rule: Rule) -> Rule:
    """An object of which every value obeys a rule."""
    return lambda value: isinstance(value, dict) and all(map(rule, value.values()))


def counts(value: object) -> bool:
    """An object whose values are all numbers of things."""
    return values_of(whole(0))(value)


def object_of(rules: dict[str, Rule]) -> Rule:
    """An object that obeys a table."""
    return lambda value: isinstance(value, dict) and broken(value, rules) is None


def having(*keys: str) -> Rule:
    """An object that states some keys, whatever they hold."""
    return lambda value: isinstance(value, dict) and value.keys() >= set(keys)


def broken(value: dict, rules: dict[str, Rule]) -> str | None:
    """The first name of a table that an object lacks, or states as what it cannot be. An optional one may be lacking."""
    return next((key for key, rule in rules.items() if not rule(value.get(key))), None)


fingerprint = text("[0-9a-f]{32}")
