"""Request fields except the prompt. Pure."""

import msgspec

from engine.frontend.apis.shared.constraints import ResponseFormat
from engine.frontend.apis.shared.fields import SamplingFields
from engine.frontend.apis.shared.namespaces import PerPrompt
from engine.frontend.apis.shared.structured_outputs import Schema, StructuredOutputs
from engine.frontend.bootstraps import Host, Port, Room
from service.http.errors import bad_field


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(SamplingFields, kw_only=True):
    """Fields of completions and chats."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    rid: str | None = None
    priority: int | None = None
    user: str | None = None
    bootstrap_host: Host = None
    bootstrap_port: Port = None
    bootstrap_room: Room = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_hidden_states: bool | None = None
    lora_path: str | None = None
    cache_salt: PerPrompt = None
    extra_key: PerPrompt = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def check_request(body: RequestFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "needs stream to be true")


def check_range(field: str, value: int | None, high: int) -> None:
    if value is not None and not 0 <= value <= high:
        raise bad_field(field, f"must be between 0 and {high}, got {value}")
