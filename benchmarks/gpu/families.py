"""Decode steps of two layers each of families with other layers than Qwen3: recurrences, windows and caps, latents."""

from typing import Any

from benchmarks.gpu.engine import make_engine
from benchmarks.gpu.steps import gap_rows
from benchmarks.gpu.target import TABLE, Target
from tests.models.tiny_checkpoints import tiny_config

FAMILIES: dict[str, dict[str, Any]] = TABLE["families"]


def hybrid(target: Target) -> dict[str, Any]:
    """Milliseconds a layer of decode steps, of two layers each of families with other layers than Qwen3, beside Qwen3's."""
    found: dict[str, Any] = {"rows": []}
    for family in FAMILIES:
        try:
            rows = _rows(target, family)
            plain = found["rows"][: len(rows)] or rows
            found["rows"] += [
                row | {"of_qwen3": row["layer_ms"] / one["layer_ms"]} for row, one in zip(rows, plain, strict=True)
            ]
        except Exception as error:  # the others have their figures
            found["rows"].append({"family": family, "said": f"{type(error).__name__}: {error}"[:200]})
        target.keep(found)
    if failed := [f"{row['family']}: {row['said']}" for row in found["rows"] if "said" in row]:
        found["error"] = "; ".join(failed)
    return found


def family_fields(target: Target, family: str) -> dict[str, Any]:
    """Return config.json of two layers of a family, with a small vocabulary."""
    return {**tiny_config(family, target.dtype), **target.pick(FAMILIES[family], {}), "num_hidden_layers": 2}


def _rows(target: Target, family: str) -> list[dict[str, Any]]:
    batches, length = target.pick(((1, 16), 256), ((2,), 20))
    flags = {"max_running_requests": max(batches), "max_total_tokens": max(batches) * (length + 160)}
    parts = make_engine(target, family_fields(target, family), attention_backend=target.pick("triton", "auto"), **flags)
    rows = gap_rows(target, parts, batches, prompt_len=length, depths=(2,))
    parts.device.executor.close()
    return [
        {"family": family, "batch": row["batch"], "layer_ms": row["step_p50_ms"] / 2, "idle": row["idle_share"]}
        for row in rows
    ]
