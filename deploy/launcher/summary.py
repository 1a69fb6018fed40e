"""Ready file and summary of a healthy cluster. Pure."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.launcher.shortfalls import shortfalls

# The shipped model answers a repeated key with its value, which it recalls only by the KV cache.
RECALL_PROMPT = "k17 v42 k03 v91 k17"
OTHER_PROMPT = "What is the capital of France? Answer in one sentence."


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process with its /get_server_info."""

    name: str
    role: str
    url: str
    pid: int
    info: Mapping[str, Any]


def ready_info(members: Sequence[Member], *, front: str) -> dict[str, Any]:
    workers = [{"role": m.role, "url": m.url, "pid": m.pid} for m in members if m.role != "router"]
    return {"router": front, "workers": workers}


def summary_text(
    members: Sequence[Member], *, front: str, backend: str | None, log_dir: Path, model: str, shipped: bool, auth: bool
) -> str:
    """Return addresses, capacities, missing features, a command to paste."""
    width = max(len(member.name) for member in members)
    lines = [f"  {m.name:<{width}}  {m.url:<28}  pid {m.pid:<8} {_capacity(m)}".rstrip() for m in members]
    how = f"KV crosses by {backend}" if backend else "unified: one worker does it all"
    return "\n".join(
        [
            "",
            f"Tandem is ready at {front} ({how})",
            "",
            *lines,
            f"  logs: {log_dir}",
            "",
            *_lacking(members),
            *_try_it(front, model, shipped, auth),
            "",
        ]
    )


def _lacking(members: Sequence[Member]) -> list[str]:
    lines = shortfalls([member.info for member in members])
    return [*(f"  ! {line}" for line in lines), ""] if lines else []


def _capacity(member: Member) -> str:
    tokens = member.info.get("max_total_num_tokens")
    what = "features of" if member.role == "encode" else "KV"
    return ", ".join([*([f"{what} {tokens:,} tokens"] if tokens else []), *_sizes(member)])


def _sizes(member: Member) -> list[str]:
    found = {name: member.info.get(f"{name.lower()}_size", 1) for name in ("TP", "PP", "DP")}
    return [f"{name} {size}" for name, size in found.items() if size > 1]


def _try_it(front: str, model: str, shipped: bool, auth: bool) -> list[str]:
    prompt = RECALL_PROMPT if shipped else OTHER_PROMPT
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 1 if shipped else 16,
        "temperature": 0,
    }
    key = " -H 'Authorization: Bearer KEY'" if auth else ""
    curl = f"  curl -s {front}/v1/chat/completions{key} -H 'Content-Type: application/json' \\"
    note = "Try it (the answer is v42: it recalls what followed k17):" if shipped else "Try it:"
    return [note, "", curl, f"    -d {shlex.quote(json.dumps(body))}", "", "Ctrl-C ends it."]
