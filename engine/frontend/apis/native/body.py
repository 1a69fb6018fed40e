"""Body of POST /generate. Pure.

Names and defaults are SGLang's (`GenerateReqInput`, `srt/managers/io_struct.py`).
"""

import array
import time
from collections.abc import Callable
from typing import Any

from engine.frontend.apis.shared.body_reader import GENERATE, SAMPLING, BodyReader, Inside
from engine.frontend.apis.shared.fields import check_range, check_token_ids, each, id_lists
from engine.frontend.apis.shared.request_body import RoutingFields, SamplingFields
from engine.frontend.apis.shared.stream import View, finite
from engine.frontend.bootstraps import BootstrapFields
from engine.frontend.client.generation import Generation, absorb
from engine.frontend.images.placeholders import MediaSource
from engine.messages import (
    MAX_REQUESTED_TOKEN_IDS,
    DraftCounts,
    FinishReason,
    GenerateRequest,
    LogprobOptions,
    TokenLogprob,
    TokenOutput,
)
from engine.text.sample import TextOutput
from service.http.body import optional
from service.http.errors import bad_field

MAX_TOP_LOGPROBS = 100

MediaData = str | list[str | list[str] | None] | None


class SamplingBody(SamplingFields):
    max_new_tokens: int | None = optional(
        "Most tokens of the answer, at least 0. Default: 128, or what fits into the context; null: what fits.", 64
    )
    min_new_tokens: int | None = optional(
        "Tokens before which no stop text or end token ends the answer. At least 0; default 0.", 1
    )
    sampling_seed: int | None = optional("SGLang's name of seed.", 42)


class GenerateBody(BootstrapFields, RoutingFields):
    text: str | list[str] | None = optional(
        "The prompt, or several. Give this or input_ids.", "The capital of France is"
    )
    input_ids: list[int | list[int]] | None = optional(
        "The prompt as token ids, or several. Give this or text.", [1, 450, 7483]
    )
    image_data: MediaData = optional(
        "Images as URL, data URL or base64: one, a list for one prompt, or a list per prompt. The prompt has the "
        "model's placeholder for each.",
        ["https://example.com/cat.png"],
    )
    video_data: MediaData = optional(
        "Videos as their frames, data:video/jpeg;base64,FRAME,FRAME..., in the same forms as image_data.",
        ["data:video/jpeg;base64,/9j/4AAQ,/9j/4AAQ"],
    )
    sampling_params: SamplingBody | list[SamplingBody] | None = optional(
        "How tokens are sampled, one for all prompts or one each. Unknown fields inside are refused.",
        {"max_new_tokens": 16, "temperature": 0},
    )
    rid: str | list[str] | None = optional(
        "Ids of the requests, for /abort_request: one, or one per prompt. Default: the server makes them.",
        "my-request-1",
    )
    stream: bool | None = optional("True: server-sent events, each with the whole text so far. Default false.", True)
    return_logprob: bool | list[bool] | None = optional(
        "True: meta_info has the tokens' logprobs. One, or one per prompt; default false.", True
    )
    logprob_start_len: int | list[int] | None = optional(
        "Position in the prompt from which its logprobs are returned. Default -1: only the answer's.", 0
    )
    top_logprobs_num: int | list[int] | None = optional(
        "Likeliest tokens to return at each position, 0 to 100. One, or one per prompt; default 0.", 5
    )
    token_ids_logprob: list[int | list[int] | None] | None = optional(
        "Token ids whose logprobs are returned at each position, at most 128. One list, or one per prompt.", [9, 10]
    )
    priority: int | None = optional(
        "Higher goes first, with --enable-priority-scheduling. -2147483647 to 2147483647; default 0.", 0
    )
    return_text_in_logprobs: bool | None = optional("True: logprobs name the tokens' texts. Default false.", True)
    return_hidden_states: bool | list[bool] | None = optional(
        "True: meta_info has hidden states; needs --enable-return-hidden-states. One, or one per prompt.", False
    )
    require_reasoning: bool | None = optional(
        "True: the answer begins with reasoning, and a constraint holds after it. Needs --reasoning-parser.", False
    )
    max_thinking_tokens: int | None = optional(
        "Tokens of reasoning after which its end is forced, at least 0. Default: no limit.", 1024
    )
    lora_path: str | list[str | None] | None = optional(
        "Name of a loaded LoRA adapter, one or one per prompt. Default: the base model.", "my-adapter"
    )


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
    check_range("top_logprobs_num", top, MAX_TOP_LOGPROBS)
    return LogprobOptions(start_len=-1 if start == num_prompt_tokens else start, top_num=top, token_ids=token_ids)


def _token_id_lists(value: list[Any] | None, num_prompts: int, *, vocab_size: int) -> list[tuple[int, ...]]:
    """Raises ApiError(400)."""
    if not value:
        return [()] * num_prompts
    lists, single = id_lists(value, field="token_ids_logprob")
    if single:
        return [requested_ids(value, field="token_ids_logprob", vocab_size=vocab_size)] * num_prompts
    if len(lists) != num_prompts:
        raise bad_field("token_ids_logprob", f"has {len(lists)} lists for {num_prompts} prompts")
    return [requested_ids(ids or [], field="token_ids_logprob", vocab_size=vocab_size) for ids in lists]


def requested_ids(ids: list[int], *, field: str, vocab_size: int) -> tuple[int, ...]:
    """Ids whose logprobs a request wants. Raises ApiError(400)."""
    if len(ids) > MAX_REQUESTED_TOKEN_IDS:
        raise bad_field(field, f"at most {MAX_REQUESTED_TOKEN_IDS} token ids, got {len(ids)}")
    check_token_ids(ids, field=field, vocab_size=vocab_size)
    return tuple(ids)


# ---- SGLang's answers of /generate.


class NativeView(View):
    """Chunks show a sample from the start, as in SGLang.

    `has_text`: false for token ids only, as in SGLang without tokenizer. `texts`: with logprobs.
    """

    def __init__(
        self,
        generation: Generation,
        requests: list[GenerateRequest],
        *,
        has_text: bool,
        texts: bool,
        single: bool,
        weight_version: Callable[[], str],
    ) -> None:
        self._samples = generation.samples
        self._requests = requests
        self._has_text = has_text
        self._texts = texts
        self._single = single
        self._weight_version = weight_version
        self._whole: dict[int, TextOutput] = {}
        self._start_s = time.monotonic()

    def body(self, answers: list[TextOutput]) -> Any:
        shown = [self._show(i, output) for i, output in enumerate(answers)]
        return shown[0] if self._single else shown

    def chunks(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        if index in self._whole:
            absorb(self._whole[index], output)
        else:
            self._whole[index] = output
        shown = self._show(index, self._whole[index])
        return [shown if self._single else {"index": index, **shown}]

    def _show(self, index: int, output: TextOutput) -> dict[str, Any]:
        shown = {"output_ids": output.tokens.new_ids, "meta_info": self._meta_info(index, output)}
        return {"text": output.text, **shown} if self._has_text else shown

    def _meta_info(self, index: int, output: TextOutput) -> dict[str, Any]:
        t, sample, request = output.tokens, self._samples[index], self._requests[index]
        meta: dict[str, Any] = {
            "id": sample.name,
            "finish_reason": shown_finish(t.finish, len(t.new_ids)),
            "prompt_tokens": sample.num_prompt_tokens,
            "completion_tokens": len(t.new_ids),
            "cached_tokens": t.cached_tokens,
            "num_retractions": t.retractions,
            "num_preemptions": t.preemptions,
            "weight_version": self._weight_version(),
            "e2e_latency": time.monotonic() - self._start_s,
            **t.times,
        }
        if t.transfer_retries:
            meta["num_transfer_retries"] = t.transfer_retries
        if t.cached_by_tier:
            meta["cached_tokens_details"] = dict(zip(("device", "host", "storage"), t.cached_by_tier, strict=True))
        if t.drafts is not None:
            meta |= _speculation_info(t.drafts)
        if request.lora:
            meta["lora_path"] = request.lora
        if request.return_hidden_states:
            meta["hidden_states"] = _hidden_state_lists(t)
        return meta if request.logprobs is None else {**meta, **self._logprob_info(output, request.logprobs)}

    def _logprob_info(self, output: TextOutput, options: LogprobOptions) -> dict[str, Any]:
        t = output.tokens
        info: dict[str, Any] = {
            "input_token_logprobs": self._rows(t.input_logprobs, output.input_logprob_texts),
            "output_token_logprobs": self._rows(t.logprobs, output.logprob_texts),
        }
        if options.top_num:
            info["input_top_logprobs"] = self._others(t.input_logprobs, output.input_logprob_texts, "top")
            info["output_top_logprobs"] = self._others(t.logprobs, output.logprob_texts, "top")
        if options.token_ids:
            info["input_token_ids_logprobs"] = self._others(t.input_logprobs, output.input_logprob_texts, "requested")
            info["output_token_ids_logprobs"] = self._others(t.logprobs, output.logprob_texts, "requested")
        return info

    def _rows(self, logprobs: list[TokenLogprob], texts: list[tuple[str, list[str]]]) -> list[list[Any]]:
        return [
            [finite(lp.logprob), lp.token_id, text[0] if self._texts else None]
            for lp, text in zip(logprobs, texts, strict=False)
        ]

    def _others(self, logprobs: list[TokenLogprob], texts: list[tuple[str, list[str]]], kind: str) -> list[Any]:
        """`kind`: "top" or "requested", whose texts follow."""
        return [
            None
            if lp.logprob is None
            else [
                [finite(p), i, text if self._texts else None]
                for (p, i), text in zip(getattr(lp, kind), others[0 if kind == "top" else len(lp.top) :], strict=False)
            ]
            for lp, (_, others) in zip(logprobs, texts, strict=False)
        ]


def shown_finish(finish: FinishReason | None, num_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.kind == "length":
        return {"type": "length", "length": num_tokens}
    if finish.kind == "abort":
        return {
            "type": "abort",
            "message": finish.message or "aborted",
            "status_code": finish.status or None,
            "err_type": None,
        }
    return {"type": finish.kind, "matched": finish.matched}


def _speculation_info(counts: DraftCounts) -> dict[str, float]:
    """SGLang's names. `spec_accept_length`: mean tokens per decode step.

    Excludes tokens of prefill, of a lost worker, and one per retraction.
    """
    return {
        "spec_verify_ct": counts.steps,
        "spec_accept_length": 1 + counts.accepted / counts.steps,
        "spec_accept_rate": counts.accepted / counts.drafted if counts.drafted else 0.0,
        "spec_accept_token_num": counts.accepted,
        "spec_draft_token_num": counts.drafted,
    }


def _hidden_state_lists(tokens: TokenOutput) -> list[Any]:
    """[prompt][hidden], then [hidden] per token, as in SGLang; the router adds decode's first."""
    later = [array.array("f", row).tolist() for row in tokens.hidden]
    if not tokens.input_hidden:
        return later
    prompt = array.array("f", tokens.input_hidden)
    width = len(prompt) // tokens.prompt_tokens
    return [[prompt[at : at + width].tolist() for at in range(0, len(prompt), width)], *later]
