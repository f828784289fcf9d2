"""Prefill and decode apart: what a decode server wrote to storage, the next server finds there.

SGLang moves no KV between CPUs: its senders pin memory for a GPU, and of a request whose transfer
is fake a prefill server keeps nothing. So the decode server computes on rows of nobody's, and an
ordinary server, whose L2 is a prefill server's, reads. What is shown is that pages of the one are
sealed and named as L2 of the other expects, not what an answer is worth.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.lab.server_metrics import scrape
from bench.lab.servers import Server, serving
from hiqcache import direct_http
from tests.e2e.conftest import MakeServer
from tests.e2e.test_l3 import wait_for_pages

pytestmark = pytest.mark.e2e

PAGE = 16
#: Whole pages of prompt, and of answer: the last token of an answer is never computed on.
PROMPT, ANSWER = 8 * PAGE, 4 * PAGE
#: What SGLang's fake transfer takes for the host of a prefill server.
NOBODY = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}


def ask(server: Server, tokens: list[int], answer: int, **more: Any) -> dict[str, Any]:
    """SGLang's own answer to a prompt of token ids, ``answer`` tokens long."""
    parameters = {"max_new_tokens": answer, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": parameters, **more}
    found: dict[str, Any] = direct_http.post(f"{server.url}/generate", body, timeout=120).json()
    return found


def test_l2_finds_in_storage_what_a_decode_server_wrote(
    make_server: MakeServer, tmp_path: Path
) -> None:
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    args = (
        *("--page-size", str(PAGE), "--hicache-mem-layout", "page_first"),
        *("--hicache-storage-backend", "file", "--served-model-name", "smollm2"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE})),
    )
    prompt = random.Random(0).choices(range(1_000, 30_000), k=PROMPT)
    decode_mode = (
        *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"),
        "--disaggregation-decode-enable-offload-kvcache",
    )
    decode = make_server("int8", *args, *decode_mode, name="pd-decode", l2=False, **env)
    server = make_server("int8", *args, name="pd-next", **env)
    with serving(decode, server):
        answer = ask(decode, prompt, ANSWER + 1, **NOBODY)["output_ids"]
        assert len(answer) == ANSWER + 1
        wait_for_pages(decode, ANSWER // PAGE)
        assert len(list(tmp_path.glob("*.bin"))) == ANSWER // PAGE

        # It writes the prompt's pages, decode wrote those behind them: one chain of keys.
        first = ask(server, prompt, 1)
        assert first["meta_info"]["cached_tokens"] == 0
        wait_for_pages(server, PROMPT // PAGE)
        again = ask(server, [*prompt, *answer, 1], 1)
        details = again["meta_info"]["cached_tokens_details"]
        assert details["storage"] == ANSWER
        assert details["device"] + details["host"] == PROMPT
        metrics = scrape(server)
        assert metrics["hiqcache_l3_read_pages_total"] == ANSWER // PAGE
        assert metrics["hiqcache_l3_corrupt_pages_total"] == 0
