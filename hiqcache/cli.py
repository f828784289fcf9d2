"""The command `hiqcache`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from hiqcache import __version__, exporter
from hiqcache.canary import command as canary
from hiqcache.geometry import KV_CACHE_DTYPES, GeometryError
from hiqcache.model import read_model
from hiqcache.plan import PAGE_SIZE, as_json, as_table, plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; the exit status (0: fine, 1: a problem, 2: bad arguments)."""
    parser = argparse.ArgumentParser(
        prog="hiqcache", description="SGLang's host KV tier, kept as INT8."
    )
    parser.add_argument("--version", action="version", version=f"hiqcache {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    planner = commands.add_parser(
        "plan", help="how many tokens a host pool holds, in BF16 and with each codec"
    )
    _add_pool(planner, required=True)
    planner.add_argument("--json", action="store_true", help="print JSON instead of a table")

    doctor = commands.add_parser(
        "doctor", help="check versions, settings and memory limits; status 1 on a problem"
    )
    _add_pool(doctor, required=False)
    doctor.add_argument(
        "--ranks", type=int, help="ranks of this host, each with such a pool (default: --tp)"
    )

    exporter_parser = commands.add_parser(
        "exporter", help="scrape both arms and serve what only the two together say"
    )
    exporter.add_arguments(exporter_parser)

    canary_parser = commands.add_parser(
        "canary", help="compare answers on restored prefixes with the same from L1, all the time"
    )
    canary.add_arguments(canary_parser)

    arguments = parser.parse_args(argv)
    try:
        run = {"plan": _plan, "doctor": _doctor, "exporter": exporter.run, "canary": canary.run}
        return run[arguments.command](arguments)
    except (GeometryError, ValueError) as error:
        print(f"hiqcache {arguments.command}: {error}", file=sys.stderr)
        return 2


def _add_pool(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--model", required=required, help="a model folder, or its config.json", metavar="PATH"
    )
    parser.add_argument(
        "--host-gb",
        type=float,
        required=required,
        help="bytes of one rank's host pool in decimal GB, as --hicache-size counts them",
        metavar="GB",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=["auto", *KV_CACHE_DTYPES],
        default="auto",
        help="what the GPU keeps, as SGLang's argument says (default auto, the model's dtype)",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        default=PAGE_SIZE,
        help=f"tokens per page (default {PAGE_SIZE}, which SGLang recommends for HiCache on a GPU)",
    )


def _plan(arguments: argparse.Namespace) -> int:
    model = read_model(arguments.model, arguments.tp).cached_as(arguments.kv_cache_dtype)
    if not model.pools:
        what = f"{arguments.model}: {model.family.name}: {model.family.refused}"
        raise GeometryError(" ".join([what, *model.notes]))
    rows = plan(model, arguments.host_gb, arguments.page_size)
    if arguments.json:
        document = as_json(model, rows, arguments.host_gb, arguments.page_size)
        print(json.dumps(document, indent=2))
        return 0
    print(f"{arguments.model}: {model.family.name}")
    for pool in model.pools:
        print(f"pool {pool.label}: {pool.geometry}, on each of {arguments.tp} rank(s)")
    print(
        f"{arguments.host_gb:g} GB per rank, pages of {arguments.page_size} (--page-size; SGLang "
        f"recommends {PAGE_SIZE} on a GPU)"
    )
    if len(model.pools) > 1 or model.state_share:
        print("SGLang shares the bytes among its pools as the GPU's memory is shared.")
    for note in model.notes:
        print(f"note: {note}")
    print(f"\n{as_table(rows)}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    # Here, not above: it loads torch, which a plan does without.
    from hiqcache.doctor import Pool, report

    if (arguments.model is None) != (arguments.host_gb is None):
        raise ValueError("--model and --host-gb go together: they describe the planned pool.")
    pool = None
    if arguments.model is not None:
        model = read_model(arguments.model, arguments.tp).cached_as(arguments.kv_cache_dtype)
        ranks = arguments.tp if arguments.ranks is None else arguments.ranks
        if ranks < 1:
            raise ValueError(f"--ranks must be at least 1, not {ranks}.")
        pool = Pool(model, arguments.host_gb, ranks, arguments.page_size)
    problems = report(pool)
    if problems:
        print(f"\n{problems} problem(s).", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
