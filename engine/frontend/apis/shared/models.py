"""The model or LoRA adapter of a request; "BASE:ADAPTER" is SGLang's form."""

from typing import NamedTuple

from engine.frontend.services import Services
from service.http.errors import ApiError, bad_field

OFF = "this server was started without --enable-lora"


class Chosen(NamedTuple):
    """The model of a request. `shown`: in answers; `lora`: adapter, empty for the base model."""

    shown: str
    lora: str


def choose_model(s: Services, model: str | None, lora_path: str | None) -> Chosen:
    """The model that both fields name. Raises ApiError, 404 if unknown."""
    named = _adapter_in(s, model)
    if named and lora_path and named != lora_path:
        raise bad_field("lora_path", f"is {lora_path!r}, and model names the adapter {named!r}; leave one out")
    lora = named or check_lora_path(s, lora_path)
    return Chosen(lora or s.model.served_name, lora)


def check_lora_path(s: Services, lora_path: str | None) -> str:
    if lora_path and not s.model.lora:
        raise bad_field("lora_path", OFF, code="unsupported_parameter")
    return lora_path or ""


def _adapter_in(s: Services, model: str | None) -> str:
    own = s.model.own_names
    if model is None or model in own:
        return ""
    for name in (model, *(model[len(base) + 1 :] for base in own if base and model.startswith(f"{base}:"))):
        if name in s.leaders.adapters:
            return name
    more = f", with the adapters {', '.join(s.leaders.adapters)}" if s.leaders.adapters else ""
    raise ApiError(
        404,
        f"the model {model!r} does not exist; this server has {s.model.served_name!r}{more}",
        field="model",
        code="model_not_found",
    )
