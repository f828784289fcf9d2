"""Terms of the contract with SGLang: a name, a behaviour, a metric; each says what is lacking."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from hiqcache.sglang.source import Source, parameters, strings

MEM = "sglang.srt.mem_cache"
ASSEMBLER = f"{MEM}.hybrid_cache.hybrid_pool_assembler"
BUILDER = f"{MEM}.kv_cache_builder"
_METRICS = "sglang.srt.observability.metrics_collector"


@dataclass(frozen=True)
class Need:
    """A class, function or constant of SGLang.

    module, name: where it is and what it is called (a method: Class.method).
    why: what HiQCache does with it.
    takes: parameters that it must have (of a class: fields of its struct).
    alone: whether no other parameter may be required, since HiQCache calls it with these.
    has: attributes that a class must have, inherited ones included.
    """

    module: str
    name: str
    why: str
    takes: tuple[str, ...] = ()
    alone: bool = False
    has: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Its dotted path."""
        return f"{self.module}.{self.name}"

    def breaches(self, source: Source) -> Iterator[str]:
        """What ``source`` lacks of it, a sentence each."""
        found = source.find(self.module, self.name)
        if found is None:
            yield f"{self.path} is not there ({self.why})."
            return
        names, required, any_keyword = parameters(found)
        if missing := [name for name in self.takes if name not in names and not any_keyword]:
            yield f"{self.path} takes no {', '.join(missing)} ({self.why})."
        if self.alone and (more := sorted(required - set(self.takes))):
            yield f"{self.path} also needs {', '.join(more)} ({self.why})."
        members = source.members(self.module, self.name) if self.has else frozenset()
        if missing := [name for name in self.has if name not in members]:
            yield f"{self.path} has no {', '.join(missing)} ({self.why})."


@dataclass(frozen=True)
class Behaviour:
    """What a function of SGLang must do, as far as its source shows it.

    says: expressions that must occur in it, in this order, as ast.unparse writes them.
    """

    module: str
    name: str
    why: str
    says: tuple[str, ...]

    @property
    def path(self) -> str:
        """Its dotted path."""
        return f"{self.module}.{self.name}"

    def breaches(self, source: Source) -> Iterator[str]:
        """What ``source`` does not show, a sentence each."""
        found = source.find(self.module, self.name)
        if found is None:
            yield f"{self.path} is not there ({self.why})."
            return
        text, at = ast.unparse(found), 0
        for phrase in self.says:
            place = text.find(phrase, at)
            if place < 0:
                yield f"{self.path} no longer says `{phrase}` where it did ({self.why})."
                return
            at = place + len(phrase)


@dataclass(frozen=True)
class Metric:
    """A metric that a SGLang server must serve, and values of its labels that are asked for."""

    name: str
    labels: tuple[str, ...] = ()

    def breaches(self, source: Source) -> Iterator[str]:
        """What ``source`` lacks of it, a sentence each."""
        tree = source.tree(_METRICS)
        known = strings(tree) if tree is not None else frozenset()
        if self.name not in known and self.name.removesuffix("_total") not in known:
            yield f"the metric {self.name} is not in {_METRICS} (dashboards and rules read it)."
        elif missing := [label for label in self.labels if label not in known]:
            yield f"the metric {self.name} has no {', '.join(missing)} in {_METRICS}."
