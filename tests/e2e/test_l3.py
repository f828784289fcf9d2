"""Encoded pages in SGLang's file backend and in a Mooncake store, on started servers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.demo import passages
from bench.lab.completions import client_of, complete
from bench.lab.mooncake import Mooncake
from bench.lab.server_metrics import scrape
from bench.lab.servers import Server
from hiqcache import direct_http
from hiqcache.codecs.formats import row_formats
from hiqcache.record import RecordLayout, kv_parts
from hiqcache.storage.seal import SEAL_BYTES
from tests.e2e.conftest import MakeServer

pytestmark = pytest.mark.e2e

PAGE = 16
ANSWER_TOKENS = 4
#: SGLang reads no prefix of fewer tokens from storage (its threshold is 256), and writes whole
#: pages; the last token of a prompt is never cached.
PROMPT_TOKENS = 630
STORED_TOKENS = 624


def server_of(make_server: MakeServer, backend: str, layout: str, name: str, **env: str) -> Server:
    return make_server(
        "int8",
        *("--page-size", str(PAGE), "--hicache-mem-layout", layout),
        *("--hicache-storage-backend", backend, "--served-model-name", "smollm2"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        name=name,
        **env,
    )


def prompts(model: Path) -> tuple[list[int], list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer("\n".join(passages(model, 32)))["input_ids"]
    return tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS : 2 * PROMPT_TOKENS]


def wait_for_pages(server: Server, pages: int) -> None:
    deadline = time.monotonic() + 60
    while scrape(server)["hiqcache_l3_written_pages_total"] < pages:
        assert time.monotonic() < deadline, "pages do not reach storage"
        time.sleep(0.2)


def test_a_restarted_server_of_another_layout_finds_whole_pages_alone(
    make_server: MakeServer, model: Path, tmp_path: Path
) -> None:
    one, two = prompts(model)
    layout = RecordLayout(30, PAGE, row_formats("int8", kv_parts(3, 64)), trailer_bytes=SEAL_BYTES)
    pages = STORED_TOKENS // PAGE
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}

    with server_of(make_server, "file", "page_first", "l3-before", **env) as server:
        server.wait()
        client = client_of(server.url)
        for prompt in (one, two):
            complete(client, prompt, ANSWER_TOKENS)
        # L1 holds one of them: this one comes back from L2.
        from_l2 = complete(client, one, ANSWER_TOKENS)
        assert from_l2.host_tokens == STORED_TOKENS
        wait_for_pages(server, 2 * pages)
        metrics = scrape(server)
        assert metrics["hiqcache_l3_written_bytes_total"] == 2 * pages * layout.page_bytes

    files = list(tmp_path.glob("*.bin"))
    assert len(files) >= 2 * pages
    assert {file.stat().st_size for file in files} == {layout.page_bytes}
    # 66 B per row of 64 where SGLang stores 128.
    assert layout.page_bytes / (30 * 2 * 3 * 128 * PAGE) == pytest.approx(66 / 128, rel=0.001)

    with server_of(make_server, "file", "layer_first", "l3-after", **env) as server:
        server.wait()
        client = client_of(server.url)
        from_l3 = complete(client, one, ANSWER_TOKENS)
        assert (from_l3.device_tokens, from_l3.storage_tokens) == (0, STORED_TOKENS)
        # The same pages, so the same answer to the last bit.
        assert from_l3.tokens == from_l2.tokens
        assert from_l3.logprobs == from_l2.logprobs
        assert scrape(server)["hiqcache_l3_read_pages_total"] == pages

        damage = {}
        for file in files:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
            damage[file] = bytes(content)
        damaged = complete(client, two, ANSWER_TOKENS)
        assert damaged.storage_tokens == 0
        metrics = scrape(server)
        assert metrics["hiqcache_l3_corrupt_pages_total"] >= 1
        assert metrics["hiqcache_l3_read_pages_total"] == pages
        # The page that was found out is gone, and stored anew once the prompt is computed.
        left = [file for file in files if file.exists() and file.read_bytes() == damage[file]]
        assert len(left) < len(files)


@pytest.mark.storage
def test_pages_come_back_from_mooncake_once_both_tiers_are_flushed(
    make_server: MakeServer, model: Path, tmp_path: Path
) -> None:
    one, two = prompts(model)
    with Mooncake(tmp_path) as store:
        extra = {"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": str(store.config)}
        with server_of(make_server, "mooncake", "page_first", "l3-mooncake", **extra) as server:
            server.wait()
            client = client_of(server.url)
            for prompt in (one, two):
                complete(client, prompt, ANSWER_TOKENS)
            from_l2 = complete(client, one, ANSWER_TOKENS)
            assert from_l2.host_tokens == STORED_TOKENS
            wait_for_pages(server, 2 * STORED_TOKENS // PAGE)
            direct_http.post(f"{server.url}/flush_cache", timeout=60)
            from_l3 = complete(client, one, ANSWER_TOKENS)
            assert (from_l3.device_tokens, from_l3.storage_tokens) == (0, STORED_TOKENS)
            assert from_l3.tokens == from_l2.tokens
            assert from_l3.logprobs == from_l2.logprobs
            assert scrape(server)["hiqcache_l3_corrupt_pages_total"] == 0
