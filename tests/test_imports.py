"""Arrows between the packages: they run one way, in no circle, and one package knows SGLang.

But for one module: bench/transfers/stock.py measures SGLang's own pool, in which HiQCache has no
part, and an operator's package has no use for what only a benchmark calls.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: What each part of the repository may import of the others; a part is the longest name that fits.
MAY_IMPORT: Mapping[str, set[str]] = {
    "hiqcache": set(),
    # The load image carries it alone.
    "loadtest": set(),
    "bench": set(),
    "bench.lab": {"bench", "hiqcache", "loadtest"},
    "bench.tiers": {"bench", "bench.lab", "hiqcache", "loadtest"},
    "bench.traces": {"bench", "bench.lab", "bench.tiers", "hiqcache", "loadtest"},
    "bench.transfers": {"bench", "bench.lab", "hiqcache"},
    "bench.launches": {"bench", "bench.lab", "bench.transfers", "hiqcache"},
    "bench.metrics_overhead": {"bench", "bench.lab", "bench.transfers", "hiqcache"},
    "bench.quality": {"bench", "bench.lab", "hiqcache"},
    "bench.verify": {"bench", "bench.lab", "hiqcache"},
    "bench.models": {"bench", "bench.lab", "bench.verify", "hiqcache"},
    "bench.canary": {"bench", "bench.lab", "bench.quality", "hiqcache"},
    "bench.clients": {"bench", "bench.lab", "hiqcache", "loadtest"},
    "bench.soak": {"bench", "bench.lab", "bench.transfers", "bench.verify", "hiqcache"},
    "bench.codec_study": {"bench", "bench.lab", "hiqcache"},
    "bench.demo": {"bench", "bench.lab", "hiqcache"},
    "bench.seals": {"bench", "bench.lab", "hiqcache"},
    "bench.clock": {"bench", "bench.lab", "hiqcache", "loadtest"},
    "bench.findings": {"bench", "bench.lab", "bench.transfers", "hiqcache"},
    "bench.readme": {
        *("bench", "bench.clients", "bench.demo", "bench.quality", "bench.soak", "bench.tiers"),
        *(
            "bench.traces",
            "bench.findings",
            "bench.transfers",
            "bench.verify",
            "bench.lab",
            "hiqcache",
        ),
    },
    "monitoring": {"bench", "bench.lab", "hiqcache"},
    "docker": {"hiqcache"},
    "docs": {"hiqcache"},
}

#: Where SGLang may be imported: one package, and the one module above that is none of it.
SGLANG_PACKAGE, STOCK = "hiqcache.sglang", "bench.transfers.stock"


def imports(source: str, module: str, modules: set[str]) -> set[str]:
    """Modules that ``source`` imports anywhere, late imports and those for types included.

    A name imported from a package is the module of that name where there is one.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    # Python runs the packages around a module before it; those around the importer run already.
    around = {package for name in found for package in packages(name)}
    return found | (around & modules) - packages(module)


def words(source: str) -> set[str]:
    """The strings of ``source``, each as a whole."""
    nodes = ast.walk(ast.parse(source))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def attributes(source: str) -> set[str]:
    """Names that ``source`` asks an object for."""
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


def takes_proxies(source: str) -> bool:
    """Whether a client that ``source`` makes reads proxies from the environment.

    httpx's and requests' do unless told not to, aiohttp's if told to.
    """
    tree = ast.parse(source)
    straight = any(
        isinstance(node, ast.Assign) and ast.unparse(node).endswith(".trust_env = False")
        for node in ast.walk(tree)
    )
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        client = ast.unparse(node.func)
        given = {one.arg: ast.unparse(one.value) for one in node.keywords}.get("trust_env")
        if client in ("httpx.Client", "httpx.AsyncClient") and given != "False":
            return True
        if client == "aiohttp.ClientSession" and given not in (None, "False"):
            return True
        if client == "requests.Session" and not straight:
            return True
        package, _, name = client.partition(".")
        verbs = ("get", "post", "put", "head", "delete", "request", "stream")
        if package in ("httpx", "requests") and name in verbs:
            return True
    return False


def packages(module: str) -> set[str]:
    """The packages that ``module`` lies in."""
    names = module.split(".")
    return {".".join(names[:length]) for length in range(1, len(names))}


def repository() -> dict[str, str]:
    """Every module of the repository but the tests, and its source."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    paths = {
        file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): ROOT / file
        for file in files
        if not file.startswith("tests/") and (ROOT / file).exists()
    }
    return {module: path.read_text() for module, path in paths.items()}


def part(module: str) -> str:
    """The part of the repository that ``module`` belongs to. Raises ValueError."""
    fitting = [name for name in MAY_IMPORT if inside(module, name)]
    return max(fitting, key=len)


def upward(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Imports that MAY_IMPORT does not allow."""
    for module, imported in graph.items():
        for other in imported & graph.keys():
            if part(other) not in MAY_IMPORT[part(module)] | {part(module)}:
                yield f"{module} imports {other}"


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of a circle, the first again at the end; none where there is no circle."""
    own = {module: imported & graph.keys() - {module} for module, imported in graph.items()}
    try:
        graphlib.TopologicalSorter(own).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return repository()


@pytest.fixture(scope="module")
def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    return {module: imports(source, module, set(sources)) for module, source in sources.items()}


def inside(module: str, package: str) -> bool:
    """Whether ``module`` is ``package``, or a part of it."""
    return f"{module}.".startswith(f"{package}.")


def importing(graph: Mapping[str, set[str]]) -> set[str]:
    """Modules that import SGLang."""
    return {
        module
        for module, imported in graph.items()
        if any(inside(name, "sglang") for name in imported)
    }


def test_arrows_run_one_way(graph: dict[str, set[str]]) -> None:
    assert list(upward(graph)) == []


def test_there_is_no_circle(graph: dict[str, set[str]]) -> None:
    assert circle(graph) == []


def test_one_package_imports_sglang(graph: dict[str, set[str]]) -> None:
    assert {each for each in importing(graph) if not inside(each, SGLANG_PACKAGE)} == {STOCK}
    # An exception is for what it is: nothing of ours is measured there.
    ours = {each for each in graph[STOCK] if inside(each, "hiqcache")}
    assert ours == {"hiqcache", "hiqcache.record"}


def test_nothing_depends_on_the_original_transfer(graph: dict[str, set[str]]) -> None:
    """docs/limits.md says what it is kept for: one place builds it, and one compares it."""
    kept = {"hiqcache.transfers.mover", "hiqcache.sglang.jit_mover"}
    assert {module for module, imported in graph.items() if imported & kept} == {
        "hiqcache.sglang.transfer",
        "bench.transfers.contenders",
    }


def test_the_original_design_is_named_where_it_is_made_and_compared(
    sources: dict[str, str],
) -> None:
    """Padded records and the transfer that moves them: whatever else names them rests on them."""
    naming = {module for module, source in sources.items() if words(source) & {"mover", "padded"}}
    assert {each for each in naming if inside(each, "hiqcache")} == {
        *("hiqcache.doctor", "hiqcache.plan", "hiqcache.record", "hiqcache.settings"),
        *("hiqcache.transfers.mover", "hiqcache.sglang.transfer"),
        *("hiqcache.sglang.storage", "hiqcache.sglang.support"),
    }


def test_the_kv_shape_is_read_of_a_configuration_in_one_place(sources: dict[str, str]) -> None:
    """As SGLang reads it: another reading misses a class's defaults, and other names of a key."""
    keys = {"num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"}
    reading = {
        module for module, source in sources.items() if (words(source) | attributes(source)) & keys
    }
    # SGLang's ModelConfig has a method for it; two modules write configurations.
    writing = {"bench.lab.tiny_model", "bench.models.families"}
    assert reading - writing == {"hiqcache.model"}


def test_nothing_asks_a_server_by_a_proxy(
    graph: dict[str, set[str]], sources: dict[str, str]
) -> None:
    """direct_http is the client; what streams has another, which takes no proxy either."""
    by_proxy = {"requests", "urllib.request", "urllib3"}
    asking = {module for module, imported in graph.items() if imported & by_proxy}
    assert asking == {"loadtest.streaming"}
    assert {module for module, source in sources.items() if takes_proxies(source)} == set()


def test_a_client_that_takes_proxies_is_seen() -> None:
    for source in (
        "httpx.Client()",
        "httpx.get(url)",
        "httpx.AsyncClient(trust_env=True)",
        "aiohttp.ClientSession(trust_env=True)",
        "session = requests.Session()",
        "requests.get(url)",
    ):
        assert takes_proxies(source), source
    for source in (
        "httpx.Client(trust_env=False)",
        "aiohttp.ClientSession()",
        "session = requests.Session()\nsession.trust_env = False",
    ):
        assert not takes_proxies(source), source


def test_every_module_is_read(graph: dict[str, set[str]]) -> None:
    assert {part(module) for module in graph} == set(MAY_IMPORT)
    assert "hiqcache.codecs.int8" in graph["hiqcache.codecs"], "late imports count"


def test_what_is_forbidden_is_seen() -> None:
    seen = {"hiqcache.cli": "def late():\n    from bench.lab import arms\n", "bench.lab.arms": ""}
    graph = {name: imports(source, name, set(seen)) for name, source in seen.items()}
    assert list(upward(graph)) == ["hiqcache.cli imports bench.lab.arms"]
    late = "def late():\n    import sglang.srt.utils\n"
    assert importing({"bench.new": imports(late, "bench.new", set())}) == {"bench.new"}
    graph["bench.lab.arms"] = {"hiqcache.cli"}
    assert set(circle(graph)) == {"hiqcache.cli", "bench.lab.arms"}


def test_a_circle_through_a_package_is_seen() -> None:
    """The package imports its part, the part a module, and that another part of the package."""
    sources = {
        "bench.rows": "from bench.rows.whole import Whole",
        "bench.rows.whole": "from bench.lab import plots",
        "bench.rows.name": "",
        "bench.lab.plots": "from bench.rows.name import NAME",
    }
    graph = {name: imports(source, name, set(sources)) for name, source in sources.items()}
    assert set(circle(graph)) == {"bench.rows", "bench.rows.whole", "bench.lab.plots"}
    # A part may take another one's, whose package has begun before either.
    sources["bench.lab.plots"] = ""
    sources["bench.rows.whole"] = "from bench.rows.name import NAME"
    graph = {name: imports(source, name, set(sources)) for name, source in sources.items()}
    assert circle(graph) == []
