"""The contract with SGLang: it holds, it is whole, and what moves is named."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hiqcache.compatibility import UnsupportedError
from hiqcache.sglang import plugin, release, support
from hiqcache.sglang.adapters import ADAPTERS, adapter, adapter_for
from hiqcache.sglang.adapters.base import Adapter
from hiqcache.sglang.contract import BEHAVIOURS, METRICS, breaches, terms
from hiqcache.sglang.contract import NEEDS as COMMON_NEEDS
from hiqcache.sglang.source import Source
from hiqcache.sglang.terms import Metric, Need

REPOSITORY = Path(__file__).parents[2]

#: Of the installed release.
NEEDS = (*COMMON_NEEDS, *adapter().NEEDS)


@pytest.fixture(scope="module")
def installed() -> Source:
    source = Source.installed()
    assert source is not None
    return source


def changed(source: Source, change: Callable[[str], str], version: str = "0.5.99") -> Source:
    """``source`` with ``change`` made to the text of each file."""

    def read(path: str) -> str | None:
        text = source.read(path)
        return None if text is None else change(text)

    return Source(version, read)


def renamed(source: Source, name: str) -> Source:
    """``source`` with ``name`` called otherwise everywhere."""
    word = re.compile(rf"(?<![\w:]){re.escape(name)}\b")
    return changed(source, lambda text: word.sub(f"{name}_moved", text))


def test_it_holds_for_the_installed_release(installed: Source) -> None:
    assert breaches(installed) == []


@pytest.mark.parametrize("term", [*NEEDS, *BEHAVIOURS], ids=lambda term: term.path)
def test_a_renamed_seam_fails_by_its_name(term: Need, installed: Source) -> None:
    said = " ".join(term.breaches(renamed(installed, term.name.split(".")[-1])))
    assert f"{term.path} is not there" in said


@pytest.mark.parametrize(
    "need", [need for need in NEEDS if need.takes or need.has], ids=lambda need: need.path
)
def test_a_renamed_parameter_or_attribute_fails_by_its_name(need: Need, installed: Source) -> None:
    for name in need.takes + need.has:
        if name == need.name:
            continue
        said = " ".join(need.breaches(renamed(installed, name)))
        assert need.path in said, name
        assert name in said


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_renamed_metric_or_label_fails_by_its_name(metric: Metric, installed: Source) -> None:
    for name in (metric.name, *metric.labels):
        base = name.removesuffix("_total")
        source = changed(installed, lambda text, base=base: text.replace(base, base + "_moved"))
        assert name in " ".join(metric.breaches(source))


def test_a_parameter_that_is_newly_required_is_named(installed: Source) -> None:
    source = changed(
        installed,
        lambda text: re.sub(r"(def load_to_device_per_layer\(\s*self,)", r"\1 stream,", text),
    )
    said = " ".join(breaches(source))
    assert "load_to_device_per_layer also needs stream" in said


def test_a_restore_that_is_announced_before_it_is_enqueued_is_named(installed: Source) -> None:
    source = changed(
        installed,
        lambda text: text.replace("load_to_device_per_layer_physical", "begin_load").replace(
            "on_layer_done(layer_id)", "on_layer_done(layer_id); self.finish_load()"
        ),
    )
    assert "no longer says `host_pool.load_to_device_per_layer`" in " ".join(breaches(source))


def _imports() -> Iterator[tuple[str, str]]:
    for file in (REPOSITORY / "hiqcache").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                for alias in node.names:
                    yield file.name, f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("sglang") for alias in node.names), file


def test_every_name_that_is_imported_is_in_it() -> None:
    known = {need.path for need in NEEDS} | {"sglang.srt.plugins.hook_registry.HookRegistry"}
    missing = {(file, path) for file, path in _imports() if path not in known}
    assert not missing


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_every_hook_is_in_it(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets: list[str] = []
    monkeypatch.setenv("HIQCACHE_CODEC", codec)
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: targets.append(target))
    plugin.register()
    assert targets
    assert set(targets) <= {need.path for need in NEEDS}


def test_every_metric_of_sglang_that_anything_reads_is_in_it() -> None:
    read: set[str] = set()
    for folder in ("hiqcache", "monitoring", "bench", "loadtest"):
        for file in (REPOSITORY / folder).rglob("*"):
            if file.suffix in (".py", ".yml", ".json") and "node_modules" not in file.parts:
                for name in re.findall(r"sglang:[a-z0-9_]*[a-z0-9]", file.read_text()):
                    read.add(re.sub(r"_(bucket|sum|count)$", "", name))
    known = {metric.name for metric in METRICS}
    beginnings = {name for name in read - known if any(m.startswith(name) for m in known)}
    assert read - beginnings - {"sglang:name"} == known  # sglang:name is a comment's


def wheel(folder: Path, source: Source, version: str) -> Path:
    """A wheel of the files of ``source`` that the contract looks at."""
    file = folder / f"sglang-{version}-py3-none-any.whl"
    looked_at: dict[str, str] = {}

    def read(path: str) -> str | None:
        text = source.read(path)
        if text is not None:
            looked_at[path] = text
        return text

    breaches(Source(version, read))
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in looked_at.items():
            archive.writestr(path, text)
    return file


def test_a_wheel_is_checked_and_what_moved_is_said(
    installed: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main([str(wheel(tmp_path, installed, installed.version))]) == 0
    assert "it holds" in capsys.readouterr().out
    moved = renamed(installed, "get_mha_host_pool_cls")
    assert release.main([str(wheel(tmp_path, moved, "0.5.99"))]) == 1
    printed = capsys.readouterr().out
    assert "LACKS  sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.get_mha_host" in printed
    # Its caller reads otherwise than the installed one; others don't.
    assert "  sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__" not in printed
    other = changed(installed, lambda text: text.replace("1e9 // self", "2**30 // self"))
    assert release.main([str(wheel(tmp_path, other, "0.5.99"))]) == 1
    assert "  sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__" in capsys.readouterr().out


def test_other_files_are_no_wheels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no wheel of SGLang"):
        Source.wheel(tmp_path / "torch-2.14.1-py3-none-any.whl")


@pytest.mark.parametrize("version", ADAPTERS)
def test_terms_are_unique(version: str) -> None:
    wanted = terms(ADAPTERS[version])
    assert len(set(wanted)) == len(wanted)


def test_every_adapter_has_what_the_others_have() -> None:
    kinds = {name for name, value in vars(Adapter).items() if not name.startswith("_")}
    for version, module in ADAPTERS.items():
        for name in kinds:
            assert hasattr(module, name), f"{version} {name}"


@pytest.mark.parametrize("name", ["get_mha_host_pool_cls", "MHATokenToKVPoolHost"])
def test_a_release_is_judged_by_the_adapter_that_it_is_nearest_to(
    name: str, installed: Source
) -> None:
    assert adapter_for(renamed(installed, name)) is adapter()


def _installed_as(monkeypatch: pytest.MonkeyPatch, source: Source, version: str) -> None:
    monkeypatch.setattr(support, "installed_sglang", lambda: version)
    monkeypatch.setattr(Source, "installed", lambda: source)


def test_another_release_is_served_where_it_is_named_and_keeps_the_contract(
    installed: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed_as(monkeypatch, installed, "0.5.24")
    support.require_supported_sglang("0.5.24")
    for allowed in ("", "0.5.25"):
        with pytest.raises(UnsupportedError, match=r"HIQCACHE_ALLOW_SGLANG=0\.5\.24 serves"):
            support.require_supported_sglang(allowed)


@pytest.mark.parametrize("allowed", ["", "0.5.24"])
def test_a_release_that_breaks_the_contract_is_refused_by_what_it_lacks(
    allowed: str, installed: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed_as(monkeypatch, renamed(installed, "get_mha_host_pool_cls"), "0.5.24")
    with pytest.raises(UnsupportedError, match="get_mha_host_pool_cls is not there") as no:
        support.require_supported_sglang(allowed)
    assert "HIQCACHE_ALLOW_SGLANG" not in str(no.value)
    monkeypatch.setenv("HIQCACHE_ALLOW_SGLANG", allowed)
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    with pytest.raises(SystemExit, match="get_mha_host_pool_cls is not there"):
        plugin.register()
