"""Words for tables: short forms of parameter names, counts."""

from __future__ import annotations

from collections.abc import Iterable


def name_pattern(name: str) -> str:
    """``"model.layers.3.mlp.up_proj.weight"`` → ``"model.layers.*.mlp.up_proj.weight"``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def merge_patterns(names: Iterable[str]) -> list[str]:
    """The distinct patterns of ``names``; those that differ in one part become one, with braces.

    >>> merge_patterns(["layers.0.q_proj.weight", "layers.1.q_proj.weight", "layers.0.k_proj.weight"])
    ['layers.*.{q,k}_proj.weight']
    """
    families: list[list[tuple[str, ...]]] = []
    for pattern in dict.fromkeys(map(name_pattern, names)):
        parts = tuple(pattern.split("."))
        for family in families:
            if len(_varying([*family, parts])) == 1:
                family.append(parts)
                break
        else:
            families.append([parts])
    return [_braced(family) for family in families]


def plural(count: int, one: str, many: str) -> str:
    """``plural(1200, "matrix", "matrices")`` → ``"1,200 matrices"``."""
    return f"{count:,} {one if count == 1 else many}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first few names, quoted, and how many more there are; empty if there are none."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _varying(family: list[tuple[str, ...]]) -> list[int]:
    """The positions at which the members differ; all of them where the lengths do."""
    if len(set(map(len, family))) > 1:
        return list(range(max(map(len, family))))
    return [i for i, options in enumerate(zip(*family, strict=True)) if len(set(options)) > 1]


def _braced(family: list[tuple[str, ...]]) -> str:
    return ".".join(_alternatives(list(dict.fromkeys(options))) for options in zip(*family, strict=True))


def _alternatives(options: list[str]) -> str:
    """``["q_proj", "k_proj"]`` → ``"{q,k}_proj"``."""
    if len(options) == 1:
        return options[0]
    words = [option.split("_") for option in options]
    start, end = 0, 0
    while all(len(each) > start + 1 for each in words) and len({each[start] for each in words}) == 1:
        start += 1
    while all(len(each) > start + end + 1 for each in words) and len({each[-end - 1] for each in words}) == 1:
        end += 1
    middles = ",".join("_".join(each[start : len(each) - end]) for each in words)
    return "_".join([*words[0][:start], "{" + middles + "}", *words[0][len(words[0]) - end :]])
