"""Merge of processes' Prometheus expositions."""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

_COUNTS = ("_total", "_bucket", "_count", "_sum")


def merge_expositions(texts: Iterable[bytes], *, summed: tuple[str, ...] = ()) -> bytes:
    """Sum counts, and gauges with suffixes in `summed`; take the max of others."""
    lines: list[str] = []
    values: dict[str, float] = {}
    heads: dict[str, tuple[str, str, str]] = {}
    order: dict[str, list[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            heads.setdefault(family.name, (family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = ",".join(f'{k}="{_escaped(v)}"' for k, v in sample.labels.items())
                key = sample.name + (f"{{{labels}}}" if labels else "")
                if key not in values:
                    order.setdefault(family.name, []).append(key)
                    values[key] = sample.value
                elif sample.name.endswith((*_COUNTS, *summed)):
                    values[key] += sample.value
                elif sample.name.endswith("_created"):
                    values[key] = min(values[key], sample.value)
                else:
                    values[key] = max(values[key], sample.value)
    for name, documentation, kind in heads.values():
        shown = f"{name}_total" if kind == "counter" else name
        lines += [f"# HELP {shown} {documentation}", f"# TYPE {shown} {kind}"]
        lines += [f"{key} {values[key]}" for key in order.get(name, ())]
    return ("\n".join(lines) + "\n").encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
