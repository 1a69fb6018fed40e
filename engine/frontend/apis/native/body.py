"""Body of POST /generate. Field names and defaults are SGLang's (`GenerateReqInput`, `srt/managers/io_struct.py`)."""

from typing import Any

import msgspec

from engine.frontend.apis.shared.bootstraps import Host, Port, Room
from engine.frontend.apis.shared.fields import SamplingFields


class SamplingBody(SamplingFields, kw_only=True):
    max_new_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    beam_width: int | None = None
    custom_params: Any = None


class GenerateBody(msgspec.Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    priority: int | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | list[bool] | None = None
    lora_path: str | list[str | None] | None = None
    bootstrap_host: Host = None
    bootstrap_port: Port = None
    bootstrap_room: Room = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
