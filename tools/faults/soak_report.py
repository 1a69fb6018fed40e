"""What a soak came to: the verdict, and its section of docs/reports/reliability.md. Pure."""

from pathlib import Path
from typing import Any

from tools.faults.memory import WARM_UP_S

BY_ROUTER = "cut by a router's death"  # the connection broke, or it has not been told of all workers again
FLAT_KIB_A_REQUEST = 0.25  # 5 MiB over 20,000 requests; a request that is never forgotten costs more
DEATHS = ("kill -9", "child killed", "SIGTERM")


def verdict(result: dict[str, Any]) -> list[str]:
    """What does not hold; empty when all is well.

    A worker of each role is always there, so no request ends with an error, but by a router's death.
    """
    bad = [f"wrong: {one}" for one in result["wrong"]] + list(result["problems"])
    if errors := result["ends"].get("error", 0):
        bad.append(f"{errors} requests ended with an error though a worker of each role was there")
    for one in result["trends"]:
        if (grown := _growth(one, result)) > FLAT_KIB_A_REQUEST:
            bad.append(
                f"{one['name']}: memory grows by {grown:.2f} KiB a request ({one['kib_a_minute']:.0f} KiB a minute)"
            )
    if not result["trends"]:
        bad.append("no process lived long enough to say anything of its memory")
    return bad


def _growth(trend: dict[str, Any], result: dict[str, Any]) -> float:
    """KiB a request, by the requests that the whole cluster served in that span."""
    return float(trend["growth_kib"] / (result["requests"] * trend["span_s"] / result["took_s"]))


def render(result: dict[str, Any]) -> str:
    events, bad = result["events"], verdict(result)
    ends = sorted(result["ends"].items(), key=lambda item: -item[1])
    return (
        (Path(__file__).parent / "pages" / "soak.md")
        .read_text()
        .format(
            **result,
            minutes=result["took_s"] / 60,
            deaths=sum(events.get(how, 0) for how in DEATHS),
            died=_list(events, DEATHS),
            routers=events.get("router killed", 0),
            came=_list(events, ("back at its address", "replaced at a new address")),
            said=", ".join(f"{count:,} {end}" for end, count in ends),
            num_wrong=len(result["wrong"]),
            verdict="All holds." if not bad else "DOES NOT HOLD: " + "; ".join(bad),
            errors_table=_errors(result),
            num_trends=len(result["trends"]),
            warm_up_s=WARM_UP_S,
            flat=FLAT_KIB_A_REQUEST,
            trends_table=_trends(result),
        )
    )


def _list(events: dict[str, int], names: tuple[str, ...]) -> str:
    return ", ".join(f"{events.get(name, 0)} {name}" for name in names)


def _errors(result: dict[str, Any]) -> str:
    if not result["errors"]:
        return ""
    rows = "".join(f"| {count} | {text.replace('|', '/')} |\n" for text, count in result["errors"].items())
    return f"| errors | message |\n|---:|---|\n{rows}\n"


def _trends(result: dict[str, Any]) -> str:
    head = "| process | mean MiB | KiB a minute | KiB a request | fitted over |\n|---|---:|---:|---:|---:|\n"
    return head + "".join(
        f"| {one['name']} | {one['mean_mib']:.1f} | {one['kib_a_minute']:+.1f} | {_growth(one, result):+.4f} | {one['span_s'] / 60:.1f} min |\n"
        for one in sorted(result["trends"], key=lambda one: one["name"])
    )
