"""`hiqcache doctor`: is everything in place for a server with a quantised host pool?"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import entry_points
from typing import NamedTuple

from hiqcache.model import Model
from hiqcache.plan import plan
from hiqcache.settings import STOCK, Settings, SettingsError
from hiqcache.sglang import SUPPORTED_SGLANG


class Check(NamedTuple):
    """One finding; ``text`` says what was found and, where not ``ok``, what to do."""

    ok: bool
    name: str
    text: str


class Pool(NamedTuple):
    """A planned pool: bytes that all ranks of this host pin together."""

    model: Model
    host_gb: float
    ranks: int
    page_size: int

    @property
    def total_bytes(self) -> int:
        return int(self.host_gb * 1e9) * self.ranks


def diagnose(pool: Pool | None) -> Iterator[Check]:
    """Every check, in the order in which a start would trip over them."""
    yield _python()
    settings = yield from _settings()
    yield _sglang(settings)
    yield from _contract()
    yield from _plugins()
    yield from _device(settings)
    if pool is not None:
        yield _model(settings, pool)
        yield from _codec(settings, pool)
        yield _memlock(pool)
        yield _memory(pool)


def report(pool: Pool | None, write: Callable[[str], None] = print) -> int:
    """Write every check; the number of problems."""
    problems = 0
    for check in diagnose(pool):
        problems += not check.ok
        write(f"{'ok ' if check.ok else 'FIX'}  {check.name}: {check.text}")
    return problems


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        return Check(True, "Python", found)
    return Check(False, "Python", f"{found}; HiQCache is made for 3.11 and 3.12: use one of them.")


def _sglang(settings: Settings) -> Check:
    from hiqcache.sglang.adapters import SERVED
    from hiqcache.sglang.support import installed_sglang

    found, served = installed_sglang(), " and ".join(SERVED)
    if found in SERVED:
        return Check(True, "SGLang", found)
    if found is None:
        return Check(False, "SGLang", f"not installed: pip install sglang=={SUPPORTED_SGLANG}")
    if found == settings.allow_sglang:
        text = f"{found}, by HIQCACHE_ALLOW_SGLANG; HiQCache is tested with {served}"
        return Check(True, "SGLang", text)
    return Check(
        False,
        "SGLang",
        f"{found}; HiQCache uses internals of {served}: pip install "
        f"sglang=={SUPPORTED_SGLANG}, or a HiQCache release made for {found}. Where the contract "
        f"below holds, HIQCACHE_ALLOW_SGLANG={found} serves it untested.",
    )


def _contract() -> Iterator[Check]:
    """What HiQCache needs of the installed SGLang, by its source."""
    from hiqcache.sglang.adapters import adapter_for
    from hiqcache.sglang.contract import breaches, terms
    from hiqcache.sglang.source import Source

    source = Source.installed()
    if source is None:
        return  # said above
    lacking = breaches(source)
    for sentence in lacking:
        yield Check(False, "contract", f"{sentence} Reinstall sglang=={SUPPORTED_SGLANG}.")
    if not lacking:
        wanted = len(terms(adapter_for(source)))
        yield Check(True, "contract", f"{wanted} names, behaviours and metrics of SGLang")


def _settings() -> Generator[Check, None, Settings]:
    try:
        settings = Settings.from_env()
    except SettingsError as error:
        yield Check(False, "settings", str(error))
        return Settings()
    off = "" if settings.quantises else " (the host pool stays SGLang's own)"
    yield Check(
        True,
        "settings",
        f"codec {settings.codec}{off}, transfer {settings.transfer}, sizing {settings.sizing}, "
        f"metrics {'on' if settings.metrics else 'off'}",
    )
    return settings


def _plugins() -> Iterator[Check]:
    seen = {point.name for point in entry_points(group="sglang.srt.plugins")}
    # As SGLang's loader takes it: unset or empty is no list; a list of blanks allows nothing.
    given = os.environ.get("SGLANG_PLUGINS", "")
    allowed = [name.strip() for name in given.split(",") if name.strip()]
    platform = os.environ.get("SGLANG_PLATFORM", "")
    if "hiqcache" not in seen:
        text = (
            "SGLang does not see HiQCache: install it in SGLang's Python (pip install . in a clone "
            "of its repository, or docker/plugin.Dockerfile)."
        )
        yield Check(False, "plug-in", text)
    elif given and "hiqcache" not in allowed:
        text = f"SGLANG_PLUGINS={given!r} leaves HiQCache out: add hiqcache to it, or unset it."
        yield Check(False, "plug-in", text)
    elif platform not in ("", "hiqcache_cpu"):
        # SGLang then skips every distribution that offers another platform, as this one does.
        text = f"SGLANG_PLATFORM={platform} makes SGLang skip HiQCache: unset it."
        yield Check(False, "plug-in", text)
    else:
        yield Check(True, "plug-in", f"seen by SGLang, with {', '.join(sorted(seen))}")


def _device(settings: Settings) -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Check(True, "GPU", ", ".join(names))
    elif os.environ.get("SGLANG_PLATFORM") != "hiqcache_cpu":
        yield Check(
            False,
            "GPU",
            "torch sees no CUDA device. On a machine with a GPU, install its driver; on one "
            "without, SGLANG_PLATFORM=hiqcache_cpu serves on the CPU.",
        )
    elif settings.transfer in ("dma", "fused", "mover"):
        yield Check(
            False,
            "GPU",
            f"none, and HIQCACHE_TRANSFER={settings.transfer} needs one: unset it or set torch.",
        )
    else:
        yield Check(True, "GPU", "none; SGLANG_PLATFORM=hiqcache_cpu serves on the CPU")


def _model(settings: Settings, pool: Pool) -> Check:
    model = pool.model
    text = [f"{model.family.name}, read from {model.source}"]
    if (refusal := model.refusal(settings.codec)) is not None:
        if not (settings.allow_untried and refusal.entry.untried):
            return Check(False, "model", refusal.entry.message(f"{text[0]}. {refusal.found}"))
        text.append(f"Served by HIQCACHE_ALLOW_UNTRIED: {refusal.entry.refused}")
    return Check(True, "model", ". ".join([*text, *model.notes]))


def _codec(settings: Settings, pool: Pool) -> Iterator[Check]:
    if settings.codec == STOCK:
        yield Check(True, "codec", "bf16, every model that SGLang serves")
        return
    if pool.model.refusal(settings.codec) is not None:
        return  # said above
    rows = plan(pool.model, pool.host_gb, pool.page_size)
    stock = {row.pool: row.bytes_per_token for row in rows if row.codec == STOCK}
    # A plan has a codec's records as most transfers share them, and those of the mover.
    padded = settings.transfer == "mover"
    for row in rows:
        if row.codec != settings.codec or (row.transfer == "mover") != padded:
            continue
        if row.refused:
            yield Check(False, "codec", f"{row.refused} Pool: {row.pool}.")
        else:
            text = (
                f"{settings.codec}, pool {row.pool}: {row.bytes_per_token:,} B per token where "
                f"SGLang's own rows take {stock[row.pool]:,} B"
            )
            yield Check(True, "codec", text)


def _memlock(pool: Pool) -> Check:
    if os.environ.get("SGLANG_PLATFORM") == "hiqcache_cpu":
        return Check(True, "memlock", "nothing is pinned on a CPU")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= pool.total_bytes:
        given = "unlimited" if limit == resource.RLIM_INFINITY else _gb(limit)
        return Check(True, "memlock", given)
    return Check(
        False,
        "memlock",
        f"{_gb(limit)} may be pinned, the pool takes {_gb(pool.total_bytes)}: raise it (ulimit -l "
        "unlimited, or ulimits: memlock: -1 in Compose).",
    )


def _memory(pool: Pool) -> Check:
    try:
        from hiqcache.sglang.host_memory import memory_left, reserve_bytes

        (available, source), reserve = memory_left(), reserve_bytes()
    except ImportError as error:
        text = f"not checked: SGLang, whose reading decides, cannot be loaded ({error})"
        return Check(False, "memory", f"{text}. Install it in this Python.")
    need = pool.total_bytes + reserve
    if available >= need:
        return Check(True, "memory", f"{_gb(available)} left ({source}), {_gb(need)} wanted")
    return Check(
        False,
        "memory",
        f"{_gb(available)} left ({source}); the pool's {_gb(pool.total_bytes)} and the "
        f"{_gb(reserve)} that SGLang keeps free make {_gb(need)}: take a smaller "
        "--hicache-size, or raise the limit.",
    )


def _gb(value: int) -> str:
    return f"{value / 1e9:.2f} GB"
