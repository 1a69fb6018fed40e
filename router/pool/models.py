"""The models behind the router, and the model a request means. Pure.

Workers with one base model form a group, whose adapters may differ. A worker that reports none may
serve any. With one group workers check `model`; only an adapter's name narrows the choice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from service.http.errors import ApiError

MAX_NAMES = 1024  # per worker

Names = tuple[str, ...]


class UnknownModel(ApiError):
    """No worker serves `model`."""

    why = "model"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        message = f"model: {model!r} is not served here; there are: {', '.join(known)}"
        super().__init__(404, message, field="model", code="model_not_found")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Served models: `bases`, `names` with adapters, `owners` name -> bases."""

    bases: Names = ()
    names: Names = ()
    owners: Mapping[str, Names] = field(default_factory=dict)

    @classmethod
    def of(cls, workers: Iterable[Names]) -> "Catalogue":
        known = [names for names in workers if names]
        owners: dict[str, dict[str, None]] = {}
        for names in known:
            for name in names:
                owners.setdefault(name, {})[names[0]] = None
        bases = dict.fromkeys(names[0] for names in known)
        return cls(tuple(bases), tuple(owners), {name: tuple(of_name) for name, of_name in owners.items()})

    @property
    def several(self) -> bool:
        return len(self.bases) > 1

    def meant(self, model: str, ready: "Iterable[str] | None" = None) -> str:
        """Return the name that workers must serve, empty for any. Raises UnknownModel.

        The default among several models is the first of `ready`.
        """
        if model in self.names:
            return model
        if not self.several:
            return ""
        if model:
            raise UnknownModel(model, self.names)
        return next(iter(ready or ()), self.bases[0])

    def of_adapter(self, *, model: object, adapter: object, loads: bool) -> str:
        """Return the base model whose workers load or unload an adapter, empty for all.

        All of them, as one may not have reported the adapter. Raises UnknownModel, ValueError.
        """
        if model is not None and not isinstance(model, str):
            raise ValueError("model: must be the name of a model that is served here")
        if model:
            if self.names and model not in self.names:
                raise UnknownModel(model, self.names)
            return model if self.names else ""
        if not self.several:
            return ""
        if not loads and adapter not in self.names:
            raise UnknownModel(str(adapter), self.names)
        owners = self.bases if loads else self.owners[str(adapter)]
        if len(owners) > 1:
            raise ValueError(f"model: name the one that the adapter belongs to; there are: {', '.join(owners)}")
        return owners[0]


def serves(names: Names, model: str) -> bool:
    return not names or model in names


def parse_models(info: object, listed: object) -> Names:
    names: list[str] = []
    if isinstance(info, dict):
        names += [info[key] for key in ("served_model_name", "model_path") if isinstance(info.get(key), str)]
    names += [row["id"] for row in _rows(listed)]
    return tuple(dict.fromkeys(name for name in names if name))[:MAX_NAMES]


def has_adapters(info: object) -> bool:
    """Return whether it may serve more names than in `/server_info`."""
    return isinstance(info, dict) and bool(info.get("enable_lora") or info.get("lora_paths"))


def says_models(listed: object) -> bool:
    return isinstance(listed, dict) and isinstance(listed.get("data"), list)


def join_models(answers: Iterable[object], *, field: str = "data", key: str = "id") -> list[dict[str, Any]]:
    """Join lists of models, each name once."""
    rows: dict[str, dict[str, Any]] = {}
    for row in chain.from_iterable(_rows(answer, field, key) for answer in answers):
        rows.setdefault(row[key], row)
    return list(rows.values())


def _rows(listed: object, field: str = "data", key: str = "id") -> list[dict[str, Any]]:
    rows = listed.get(field) if isinstance(listed, dict) else None
    return (
        [row for row in rows if isinstance(row, dict) and isinstance(row.get(key), str)]
        if isinstance(rows, list)
        else []
    )
