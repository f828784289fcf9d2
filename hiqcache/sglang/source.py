"""The source text of one SGLang release, installed or in a wheel: read, never imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Source:
    """Modules of one release.

    version: its version. read: the text of a file (sglang/....py), or None where there is none.
    """

    def __init__(self, version: str, read: Callable[[str], str | None]) -> None:
        self.version = version
        self.read = read
        self.tree = cache(self._tree)

    @classmethod
    def installed(cls) -> Source | None:
        """The SGLang of this Python, which need not be loadable; None where there is none."""
        spec = find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            return None
        root = Path(spec.submodule_search_locations[0]).parent

        def read(name: str) -> str | None:
            file = root / name
            return file.read_text(encoding="utf-8") if file.is_file() else None

        return cls(version("sglang"), read)

    @classmethod
    def wheel(cls, file: Path) -> Source:
        """The release in a wheel. Raises ValueError where ``file`` is none of SGLang."""
        name = file.name.split("-")
        if name[0] != "sglang" or file.suffix != ".whl":
            raise ValueError(f"{file}: no wheel of SGLang (sglang-VERSION-....whl).")
        archive = zipfile.ZipFile(file)
        names = frozenset(archive.namelist())

        def read(path: str) -> str | None:
            return archive.read(path).decode() if path in names else None

        return cls(name[1], read)

    def text(self, module: str) -> str | None:
        """The text of ``module`` (dotted), or None where the release has none."""
        path = module.replace(".", "/")
        return self.read(f"{path}.py") or self.read(f"{path}/__init__.py")

    def _tree(self, module: str) -> ast.Module | None:
        text = self.text(module)
        return None if text is None else _parsed(text)

    def find(self, module: str, name: str) -> Definition | None:
        """What ``module`` calls ``name``: Class, function, Class.method, constant.

        Imports are followed to where it is defined, and methods to the class that defines them.
        """
        outer, _, inner = name.partition(".")
        found = self._top(module, outer, frozenset())
        if found is None:
            return None
        where, node = found
        if not inner:
            return node
        return self._member(where, node, inner) if isinstance(node, ast.ClassDef) else None

    def members(self, module: str, name: str) -> frozenset[str]:
        """Names that a class has: methods, fields, and what its methods set on self."""
        found = self._top(module, name, frozenset())
        if found is None or not isinstance(found[1], ast.ClassDef):
            return frozenset()
        return frozenset(
            member
            for _, node in self._lineage(*found)
            if isinstance(node, ast.ClassDef)
            for member in _declared(node)
        )

    def _top(
        self, module: str, name: str, seen: frozenset[tuple[str, str]]
    ) -> tuple[str, Definition] | None:
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = _absolute(module, node)
                        return self._top(origin, alias.name, seen | {(module, name)})
            elif name in _names_of(node):
                assert isinstance(node, Definition)
                return module, node
        return None

    def _member(self, module: str, node: ast.ClassDef, name: str) -> Definition | None:
        for _, each in self._lineage(module, node):
            if isinstance(each, ast.ClassDef):
                for statement in each.body:
                    if name in _names_of(statement):
                        assert isinstance(statement, Definition)
                        return statement
        return None

    def _lineage(self, module: str, node: Definition) -> Iterator[tuple[str, Definition]]:
        """The class and its bases, as far as they are this release's."""
        yield module, node
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if isinstance(base, ast.Name):
                    found = self._top(module, base.id, frozenset())
                    if found is not None:
                        yield from self._lineage(*found)


@lru_cache(maxsize=64)  # Releases share most of their files' text.
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def parameters(function: Definition) -> tuple[frozenset[str], frozenset[str], bool]:
    """The parameters of a function, those without a default, and whether it takes any keyword.

    A class's are the fields that its body declares (dataclasses, msgspec structs).
    """
    if isinstance(function, ast.ClassDef):
        fields = [
            (s.target.id, s.value)
            for s in function.body
            if isinstance(s, ast.AnnAssign)
            if isinstance(s.target, ast.Name)
        ]
        return (
            frozenset(name for name, _ in fields),
            frozenset(name for name, value in fields if value is None),
            False,
        )
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return frozenset(), frozenset(), False
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    required = positional[: len(positional) - len(given.defaults)]
    required += [a for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is None]
    names = [a.arg for a in (*positional, *given.kwonlyargs)]
    return (
        frozenset(names) - {"self", "cls"},
        frozenset(a.arg for a in required) - {"self", "cls"},
        given.kwarg is not None,
    )


def strings(tree: ast.Module) -> frozenset[str]:
    """Every string constant of a module."""
    return frozenset(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at a module's level, those under if, try and with included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, part, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _names_of(node: ast.stmt) -> frozenset[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return frozenset({node.name})
    if isinstance(node, ast.Assign):
        return frozenset(t.id for t in node.targets if isinstance(t, ast.Name))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return frozenset({node.target.id})
    return frozenset()


def _declared(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        yield from _names_of(statement)
    for each in ast.walk(node):
        if not isinstance(each, ast.Attribute) or not isinstance(each.ctx, ast.Store):
            continue
        if isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])
