"""`make compose-test`: the profile fleet in a real engine, a replica of it killed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from bench.demo import passages
from bench.lab.completions import Completion, client_of, complete
from bench.lab.models import prepare
from hiqcache import direct_http
from tests.deploy.engine import Engine
from tests.deploy.stack import Stack, eventually, running

pytestmark = pytest.mark.docker

MODEL = "smollm2"


@pytest.fixture(scope="module")
def fleet(
    engine: Engine, missing_images: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("fleet")
    with running(engine, missing_images, folder, "fleet") as found:
        wait = ("--wait", "--wait-timeout", "560")
        # Without load: whose prefix is where must be known.
        services = ("router", "prometheus")
        try:
            found.compose("up", "--detach", "--no-build", *wait, *services)
        except Exception:
            print(found.compose("ps", "--all"), found.compose("logs", "--tail", "40"), flush=True)
            raise
        yield found


def healthy(fleet: Stack) -> int:
    answer = direct_http.get(fleet.url("ROUTER", "/readiness"), timeout=30).json()
    return int(answer["healthy_workers"])


def written(fleet: Stack) -> dict[str, float]:
    return {
        arm: pages
        for arm, pages in fleet.by_arm("sum by (arm) (hiqcache_l3_written_pages_total)").items()
        if pages
    }


def test_a_killed_replica_s_prefixes_are_restored_by_the_other_from_l3(fleet: Stack) -> None:
    prompt = "\n".join(passages(prepare(), 32))[:2400]
    client = client_of(fleet.url("ROUTER"))

    def ask() -> Completion:
        return complete(client, prompt, 4, MODEL)

    cold = ask()
    pages = (cold.prompt_tokens - 1) // 64
    first = eventually(
        "one replica has written the prefix",
        lambda: next((arm for arm, count in written(fleet).items() if count >= pages), None),
        120,
    )
    service = f"sglang-{first}"
    fleet.compose("kill", service)
    restored = ask()
    print(json.dumps({"killed": service, "from storage": restored.storage_tokens}), flush=True)
    assert (restored.device_tokens, restored.host_tokens) == (0, 0)
    assert restored.storage_tokens == 64 * pages
    eventually("the router misses it", lambda: healthy(fleet) == 1, 120)

    fleet.compose("up", "--detach", "--no-build", "--no-recreate", "--wait", service)
    eventually("the router has both again", lambda: healthy(fleet) == 2, 120)
    # Its L1 and L2 are new, and the other's are out of reach.
    (other,) = {"replica-1", "replica-2"} - {first}
    fleet.compose("kill", f"sglang-{other}")
    back = ask()
    assert (back.device_tokens, back.host_tokens) == (0, 0)
    assert back.storage_tokens == 64 * pages
    assert (back.tokens, back.logprobs) == (restored.tokens, restored.logprobs)
