"""Flags of `tandem chat`."""

import os
from dataclasses import dataclass

from service.flags import FlagSet, flag

KEY_VARIABLE = "TANDEM_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ChatConfig(FlagSet):
    url: str = flag("http://127.0.0.1:8000", "router, worker or other server of the OpenAI API")
    model: str | None = flag(None, "model or adapter to talk to; default: the first of /v1/models")
    system: str | None = flag(None, "system prompt")
    temperature: float | None = flag(None, "sampling temperature; default: the server's", least=0, most=2)
    max_tokens: int | None = flag(None, "most tokens of an answer; default: the server's", least=1)
    api_key: str | None = flag(None, f"key to send as 'Authorization: Bearer KEY'; default: ${KEY_VARIABLE}")

    @property
    def key(self) -> str | None:
        return self.api_key or os.environ.get(KEY_VARIABLE) or None
