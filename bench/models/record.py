"""The records of a run, one for each family and arm, and what they come to beside stock's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def stock_of(records: Sequence[Record], family: str) -> Record | None:
    """The record of SGLang's own pool for ``family``, if there is one."""
    found = [each for each in records if each["family"] == family and each["arm"] == "bf16"]
    return found[0] if found else None


def beside(record: Record, stock: Record) -> dict[str, Any]:
    """An arm against stock in the same bytes.

    factor: tokens of L2 for each of stock's. bytes_factor: stock's bytes per token of KV for each
    of the arm's, which is the factor where KV is all that L2 keeps. restore: its time for each
    millisecond of stock's, by prompt tokens; without those that either was not timed for.
    """
    tokens = [each["capacity"]["host_total_tokens"] for each in (record, stock)]
    sizes = [_row_bytes(each) for each in (stock, record)]
    times = {each["prompt_tokens"]: each["ms"] for each in stock.get("restores", ())}
    return {
        "factor": round(tokens[0] / tokens[1], 4),
        "bytes_factor": round(sizes[0] / sizes[1], 4),
        "restore": {
            str(each["prompt_tokens"]): round(each["ms"] / times[each["prompt_tokens"]], 4)
            for each in record.get("restores", ())
            if each["ms"] and times.get(each["prompt_tokens"])
        },
    }


def compared(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The records, those of other arms than stock with what they come to beside it."""
    done = []
    for record in records:
        stock = stock_of(records, record["family"])
        ready = stock is not None and stock is not record
        if ready and "capacity" in record and "capacity" in (stock or {}):
            assert stock is not None
            done.append({**record, "beside_stock": beside(record, stock)})
        else:
            done.append(dict(record))
    return done


def line(record: Record) -> str:
    """A record in a line."""
    head = f"{record['family']} {record['arm']}:"
    if "pressure" not in record or not record.get("restores"):
        return f"{head} not finished; problems: {record['problems']}"
    exact, pressure = record["exact"], record["pressure"]
    times = ", ".join(
        f"{each['prompt_tokens']} tokens {each['ms'] or float('nan'):.3f} ms"
        for each in record["restores"]
    )
    return (
        f"{head} L2 {record['capacity']['host_total_tokens']:,.0f} tokens; "
        f"{exact['equal']} of {exact['compared']} equal; {pressure['requests']} requests, "
        f"{pressure['restored_requests']} restored, {pressure['mismatches']} mismatches, "
        f"largest change {pressure['largest_change_restored']:.2f} of {pressure['bound']:.2f}; "
        f"restores: {times}; {record.get('beside_stock', '')}; problems: {record['problems']}"
    )


def _row_bytes(record: Record) -> float:
    """Bytes that a token takes in all of its KV pools."""
    ranks = record["capacity"]["ranks"].values()
    return float(sum(pool["bytes_per_token"] for pools in ranks for pool in pools.values()))
