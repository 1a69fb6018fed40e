"""Body of POST /generate. Pure.

Names and defaults are SGLang's (`GenerateReqInput`, `srt/managers/io_struct.py`).
"""

from typing import Any

import msgspec

from engine.frontend.apis.shared.body_reader import BodyReader, Inside
from engine.frontend.apis.shared.fields import SamplingFields, check_token_ids, each, id_lists
from engine.frontend.apis.shared.namespaces import PerPrompt
from engine.frontend.apis.shared.refused import GENERATE, SAMPLING
from engine.frontend.bootstraps import Host, Port, Room
from engine.frontend.images.source import MediaSource
from engine.messages import MAX_ASKED_TOKEN_IDS, LogprobOptions
from service.http.errors import bad_field

MAX_TOP_LOGPROBS = 100

MediaData = str | list[str | list[str] | None] | None


class SamplingBody(SamplingFields, kw_only=True):
    max_new_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    image_data: MediaData = None
    video_data: MediaData = None
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
    require_reasoning: bool | None = None
    max_thinking_tokens: int | None = None
    lora_path: str | list[str | None] | None = None
    cache_salt: PerPrompt = None
    extra_key: PerPrompt = None
    bootstrap_host: Host = None
    bootstrap_port: Port = None
    bootstrap_room: Room = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


READER = BodyReader(
    body=GenerateBody,
    refused=GENERATE,
    inside=Inside(field="sampling_params", type=SamplingBody, refused=SAMPLING),
)


def media_sources(body: GenerateBody, num_prompts: int, *, single: bool) -> list[list[MediaSource]]:
    """Images, then videos, of each prompt. Raises ApiError(400)."""
    images = _media_of("image_data", body.image_data, num_prompts, single=single)
    videos = _media_of("video_data", body.video_data, num_prompts, single=single)
    return [[*of_images, *of_videos] for of_images, of_videos in zip(images, videos, strict=True)]


def _media_of(field: str, value: MediaData, num_prompts: int, *, single: bool) -> list[list[MediaSource]]:
    """One or a list for one prompt; one for all, or one entry each for several."""
    is_video = field == "video_data"
    if not isinstance(value, list):
        return [_sources(field, value, is_video)] * num_prompts
    if single and not any(isinstance(entry, list) for entry in value):
        return [_sources(field, value, is_video)]
    entries = each(field, value, num_prompts)
    return [_sources(f"{field}[{i}]", entry, is_video) for i, entry in enumerate(entries)]


def _sources(field: str, value: Any, is_video: bool) -> list[MediaSource]:
    if isinstance(value, list):
        return [one for i, entry in enumerate(value) for one in _sources(f"{field}[{i}]", entry, is_video)]
    return [] if value is None else [MediaSource(field=field, url=value, is_base64=True, is_video=is_video)]


def logprob_options(body: GenerateBody, prompts: list[list[int]], *, vocab_size: int) -> list[LogprobOptions | None]:
    wanted = each("return_logprob", body.return_logprob, len(prompts))
    starts = each("logprob_start_len", body.logprob_start_len, len(prompts))
    tops = each("top_logprobs_num", body.top_logprobs_num, len(prompts))
    token_ids = _token_id_lists(body.token_ids_logprob, len(prompts), vocab_size=vocab_size)
    return [
        _one_logprob_options(start, top or 0, requested, num_prompt_tokens=len(ids)) if want else None
        for want, start, top, requested, ids in zip(wanted, starts, tops, token_ids, prompts, strict=True)
    ]


def _one_logprob_options(
    start: int | None, top: int, token_ids: tuple[int, ...], *, num_prompt_tokens: int
) -> LogprobOptions:
    start = -1 if start is None else start
    if not -1 <= start <= num_prompt_tokens:
        raise bad_field(
            "logprob_start_len",
            f"must be -1 (output only) or a position in the prompt of {num_prompt_tokens} tokens, got {start}",
        )
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise bad_field("top_logprobs_num", f"must be between 0 and {MAX_TOP_LOGPROBS}, got {top}")
    return LogprobOptions(start_len=-1 if start == num_prompt_tokens else start, top_num=top, token_ids=token_ids)


def _token_id_lists(value: list[Any] | None, num_prompts: int, *, vocab_size: int) -> list[tuple[int, ...]]:
    """Raises ApiError(400)."""
    if not value:
        return [()] * num_prompts
    lists, single = id_lists(value, field="token_ids_logprob")
    if single:
        return [_checked(value, vocab_size=vocab_size)] * num_prompts
    if len(lists) != num_prompts:
        raise bad_field("token_ids_logprob", f"has {len(lists)} lists for {num_prompts} prompts")
    return [_checked(ids or [], vocab_size=vocab_size) for ids in lists]


def _checked(ids: list[int], *, vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_ASKED_TOKEN_IDS:
        raise bad_field("token_ids_logprob", f"at most {MAX_ASKED_TOKEN_IDS} token ids, got {len(ids)}")
    check_token_ids(ids, field="token_ids_logprob", vocab_size=vocab_size)
    return tuple(ids)
