"""What a kernel's source consists of: its module and every module of this library that it imports."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

_LIBRARY = "dmuon."
_PARSING = Lock()
"""Python 3.11 counts the depth of a tree for all threads together, and fails where two of them parse."""


@lru_cache
def source_digest(module: str) -> str:
    """A digest of the source of ``module``, relative to ``dmuon.kernels.gpu``, and of all it imports from dmuon.

    Nothing is imported but packages, so that a kernel's digest costs no DSL.

    Raises:
        ValueError: there is no such module.
    """
    name = f"dmuon.kernels.gpu.{module}"
    if _origin(name) is None:
        raise ValueError(f"no module is called {name}")
    found: dict[str, bytes] = {}
    pending = [name]
    while pending:
        name = pending.pop()
        path = _origin(name)
        if name not in found and path is not None:
            found[name] = path.read_bytes()
            with _PARSING:
                tree = ast.parse(found[name])
            pending += _imported(tree)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(f"{name} {len(found[name])}\n".encode())
        digest.update(found[name])
    return digest.hexdigest()


def _imported(tree: ast.Module) -> Iterator[str]:
    """The modules of this library that ``tree`` imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(_LIBRARY))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_LIBRARY):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _origin(name: str) -> Path | None:
    """The file of module ``name``; ``None`` if it is none, such as a class of a module."""
    parent, _, _ = name.rpartition(".")
    if parent and not _is_package(parent):
        return None  # asking further would import `parent`
    spec = find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


@lru_cache
def _is_package(name: str) -> bool:
    parent, _, _ = name.rpartition(".")
    if parent and not _is_package(parent):
        return False
    spec = find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None
