"""Which host pools are quantised and how many slots each gets, by SGLang's own assembly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hiqcache.compatibility import FAMILIES
from hiqcache.sglang.adapters import adapter
from tests.sglang.assembled import (
    DECODE,
    OFFLOAD,
    Assembled,
    Shape,
    apart,
    assembled,
    indexed,
    latent,
    of_model_type,
    offloaded,
    plain,
    recurrent,
    refused,
    sliding,
    sparse_attention,
    staged,
    stored_l2,
    without_l2,
)

SIZE = {"hicache_ratio": None, "hicache_size": 1}

#: The KV pools of each kind of model, and how many layers each has.
KV = {
    plain: {"kv": 3},
    latent: {"kv": 3},
    indexed: {"kv": 3},
    sliding: {"kv": 2, "swa": 3},
    recurrent: {"kv": 2},
}

#: Those that the installed release of SGLang describes the rows of.
SHAPES = [shape for shape in KV if adapter().LATENT or shape not in (latent, indexed)]

FAMILY = {
    plain: "plain",
    latent: "mla",
    indexed: "dsa",
    sliding: "sliding",
    recurrent: "linear",
}

#: Bytes of a layer's row, SGLang's and int8's.
QUANTISED = {
    "MHATokenToKVPoolHostCopy": "QuantisedMHATokenToKVPoolHost",
    "MLATokenToKVPoolHostCopy": "QuantisedMLATokenToKVPoolHost",
}
ROW = {latent: (1152, 586), indexed: (1152, 586)}
HEADS_ROW = 2 * 256, 2 * 132


@pytest.fixture(scope="module")
def assemble() -> Callable[..., Assembled]:
    known: dict[str, Assembled] = {}

    def once(*args: Any, **kwargs: Any) -> Assembled:
        key = f"{args} {kwargs}"
        if key not in known:
            known[key] = apart(assembled, *args, **kwargs)
        return known[key]

    return once


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("flags", [{}, SIZE, {"page_size": 16}], ids=["ratio", "size", "pages"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_pool_grows_alike_within_the_bytes_of_sglangs_own(
    shape: Any, flags: dict[str, Any], drafts: int, assemble: Callable[..., Assembled]
) -> None:
    if shape is recurrent and "page_size" in flags:
        pytest.skip("SGLang keeps recurrent states at pages of one token")
    if shape is indexed:
        flags = {**flags, "page_size": 64}  # an indexer's
    stock = assemble(shape, "bf16", flags=flags, drafts=drafts)
    ours = assemble(shape, "int8", flags=flags, drafts=drafts)
    assert list(ours.pools) == list(stock.pools)
    for name, layers in KV[shape].items():
        assert ours.pools[name].kind == QUANTISED[stock.pools[name].kind]
        assert ours.pools[name].layers == layers
        # And what a page is rounded up by.
        row, own = ROW.get(shape, HEADS_ROW)
        assert own * layers <= ours.pools[name].bytes_per_slot < row * layers
        assert stock.pools[name].bytes_per_slot == row * layers
    for name in set(ours.pools) - set(KV[shape]):
        assert ours.pools[name].kind == stock.pools[name].kind
        assert ours.pools[name].bytes_per_slot == stock.pools[name].bytes_per_slot
    # Each pool is rounded down to pages, and SGLang adds one.
    page = flags.get("page_size", 1)
    spare = 2 * sum(pool.bytes_per_slot * page for pool in stock.pools.values())
    assert abs(ours.bytes - stock.bytes) <= spare
    grown = {name: (p.slots - page) / stock.pools[name].slots for name, p in ours.pools.items()}
    most = {name: (p.slots + page) / stock.pools[name].slots for name, p in ours.pools.items()}
    assert max(grown.values()) <= min(most.values())
    assert min(most.values()) > 1


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_table_refuses_is_refused_by_its_device_pool(shape: Any) -> None:
    family = FAMILIES[FAMILY[shape]]
    flags = {"page_size": 64} if shape is indexed else {}
    if family.served:
        assert apart(assembled, shape, flags=flags, served=False).pools
        return
    text = apart(refused, shape, flags=flags, served=False)
    assert family.refused in text
    assert "HIQCACHE_CODEC" in text


@pytest.mark.skipif(adapter().LATENT, reason="this SGLang describes latent rows")
@pytest.mark.parametrize("shape", [latent, indexed])
def test_latent_rows_are_refused_where_sglang_does_not_describe_them(shape: Any) -> None:
    text = apart(refused, shape, flags={"page_size": 64})
    assert "latent" in text
    assert "HIQCACHE_CODEC" in text


def test_sizing_by_tokens_keeps_sglangs_slots(assemble: Callable[..., Assembled]) -> None:
    stock = assemble(sliding, "bf16")
    ours = assemble(sliding, "int8", environment={"HIQCACHE_SIZING": "tokens"})
    assert [p.slots for p in ours.pools.values()] == [p.slots for p in stock.pools.values()]
    assert ours.bytes < stock.bytes


@pytest.mark.parametrize(
    ("shape", "stages", "page_size"),
    [
        (plain, [{"layers": 3}, {"layers": 4}], 1),
        (plain, [{"layers": 3}, {"layers": 4}], 16),
        (latent, [{"layers": 3}, {"layers": 4}], 16),
        (indexed, [{"layers": 3, "without": 1}, {"layers": 4}], 64),
        (sliding, [{"full": 1, "swa": 4}, {"full": 3, "swa": 2}], 16),
        (recurrent, [{"full": 1, "linear": 2}, {"full": 2, "linear": 5}], 1),
    ],
    ids=["plain", "plain pages", "latent", "indexed", "sliding", "recurrent"],
)
def test_pipeline_stages_get_equal_slots_without_asking_each_other(
    shape: Any, stages: list[dict[str, int]], page_size: int
) -> None:
    """Each stage alone in its process: nothing but what it knows can decide."""
    if shape not in SHAPES:
        pytest.skip("this SGLang does not describe latent rows, which are refused below")
    flags = {"pp_size": 2, "page_size": page_size}
    found = [
        apart(assembled, shape, flags=flags, rank=rank, **stage)
        for rank, stage in enumerate(stages)
    ]
    assert found[0].pools["kv"].kind in QUANTISED.values()
    slots = [{name: pool.slots for name, pool in stage.pools.items()} for stage in found]
    assert slots[0] == slots[1]
    if shape is not recurrent:
        stock = apart(assembled, shape, "bf16", flags=flags, **stages[0])
        assert slots[0]["kv"] > 1.3 * stock.pools["kv"].slots
        assert found[0].bytes <= stock.bytes


def test_retracted_requests_stay_in_sglangs_own_pool(assemble: Callable[..., Assembled]) -> None:
    """A decode server's default: its host pool holds answers in the making, not a cache."""
    found = assemble(plain, flags=DECODE)
    assert found.pools["kv"].kind == "MHATokenToKVPoolHostCopy"
    assert "retracted requests stays SGLang's own" in found.log


#: L2 and retracted requests in one pool.
BOTH = {
    **DECODE,
    "enable_hierarchical_cache": True,
    "disaggregation_decode_enable_radix_cache": True,
    "disaggregation_transfer_backend": "mooncake",
}


@pytest.mark.parametrize("flags", [DECODE, BOTH], ids=["retraction", "both"])
def test_retracted_requests_are_quantised_where_the_operator_asks(flags: dict[str, Any]) -> None:
    found = apart(assembled, plain, flags=flags, environment={"HIQCACHE_RETRACTION": "quantised"})
    assert found.pools["kv"].kind == "QuantisedMHATokenToKVPoolHost"


def test_a_pool_of_both_purposes_is_refused() -> None:
    text = apart(refused, plain, flags=BOTH)
    assert "--disaggregation-decode-retraction-backup cpu_tensor" in text
    assert "HIQCACHE_CODEC" in text


@pytest.mark.parametrize("shape", [s for s in (plain, latent) if s in SHAPES])
def test_decode_offload_writes_what_prefill_s_l2_reads(shape: Shape) -> None:
    written, read = apart(offloaded, "int8", shape), apart(stored_l2, "int8", shape)
    assert written == read
    assert "Quantised" in written[0]
    # Another codec's pages have another name; without one they are SGLang's own.
    assert apart(offloaded, "int8-rot", shape)[2] != written[2]
    stock = apart(offloaded, "bf16", shape)
    assert "Quantised" not in stock[0]
    assert written[1] < stock[1]


@pytest.mark.parametrize("shape", [s for s in (plain, latent) if s in SHAPES])
def test_host_pools_of_sparse_attention_stay_sglang_s_own(shape: Shape) -> None:
    kind, classes = apart(sparse_attention, "int8", shape)
    assert "Quantised" in kind
    assert classes
    assert all(name.startswith("sglang.srt.mem_cache.pool_host.") for name in classes)
    assert not any("Quantised" in name or "Copy" in name for name in classes)


def test_offload_of_several_pools_is_refused() -> None:
    text, *_ = apart(offloaded, "int8", plain, pool_label="swa")
    assert "--disaggregation-decode-enable-offload-kvcache" in text
    assert "HIQCACHE_CODEC" in text


def test_without_l2_the_operator_is_told_once_what_to_add() -> None:
    log = apart(without_l2, "int8")
    assert log.count("does nothing here") == 1
    assert "--enable-hierarchical-cache" in log
    assert "does nothing" not in apart(without_l2, "bf16")
    # A decode server that offloads has a pool to quantise without L2.
    assert "does nothing" not in apart(without_l2, "int8", **OFFLOAD)


@pytest.mark.parametrize(
    ("kind", "codec", "refused"),
    [
        ("llama", "int4", False),
        ("cohere", "int4", True),
        ("cohere", "int8", False),
        ("cohere", "int8-rot", False),
    ],
)
def test_k_that_turns_otherwise_is_refused_for_int4(kind: str, codec: str, refused: bool) -> None:
    text = apart(of_model_type, kind, codec)
    assert bool(text) == refused
    if refused:
        assert "K of model type 'cohere'" in text
        assert "Set HIQCACHE_CODEC=int8" in text
        assert apart(of_model_type, kind, codec, enabled=False) == "", "there is nothing to store"
        offload = {**OFFLOAD, "page_size": 64}
        offload.pop("enable_hierarchical_cache")
        assert apart(of_model_type, kind, codec, enabled=False, **offload) == text


def test_write_back_memory_is_set_aside_for_sglangs_own_pools_alone() -> None:
    assert apart(staged, "bf16") == [3, 1]
    assert apart(staged, "int8") == [1]  # the draft's
    assert apart(staged, "int8", flags=DECODE) == [3, 1]
