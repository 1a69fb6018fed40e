"""SGLang's answers of /generate."""

import array
import time
from collections.abc import Callable
from typing import Any

from engine.frontend.apis.shared.stream import finite
from engine.frontend.client.generation import Generation, absorb
from engine.messages import DraftCounts, FinishReason, GenerateRequest, LogprobOptions, TokenLogprob, TokenOutput
from engine.text.sample import TextOutput


class NativeView:
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

    def last(self) -> list[dict[str, Any]]:
        return []

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
            info["input_top_logprobs"] = self._top_rows(t.input_logprobs, output.input_logprob_texts)
            info["output_top_logprobs"] = self._top_rows(t.logprobs, output.logprob_texts)
        if options.token_ids:
            info["input_token_ids_logprobs"] = self._requested_rows(t.input_logprobs, output.input_logprob_texts)
            info["output_token_ids_logprobs"] = self._requested_rows(t.logprobs, output.logprob_texts)
        return info

    def _rows(self, logprobs: list[TokenLogprob], texts: list[tuple[str, list[str]]]) -> list[list[Any]]:
        return [
            [finite(lp.logprob), lp.token_id, text[0] if self._texts else None]
            for lp, text in zip(logprobs, texts, strict=False)
        ]

    def _top_rows(self, logprobs: list[TokenLogprob], texts: list[tuple[str, list[str]]]) -> list[Any]:
        return [
            None if lp.logprob is None else self._entries(lp.top, top_texts)
            for lp, (_, top_texts) in zip(logprobs, texts, strict=False)
        ]

    def _requested_rows(self, logprobs: list[TokenLogprob], texts: list[tuple[str, list[str]]]) -> list[Any]:
        return [
            None if lp.logprob is None else self._entries(lp.requested, more_texts[len(lp.top) :])
            for lp, (_, more_texts) in zip(logprobs, texts, strict=False)
        ]

    def _entries(self, pairs: list[tuple[float, int]], texts: list[str]) -> list[list[Any]]:
        return [[finite(p), i, t if self._texts else None] for (p, i), t in zip(pairs, texts, strict=False)]


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
    """[prompt][hidden], then [hidden] per token, as in SGLang.

    The router adds decode's missing first.
    """
    later = [array.array("f", row).tolist() for row in tokens.hidden]
    if not tokens.input_hidden:
        return later
    prompt = array.array("f", tokens.input_hidden)
    width = len(prompt) // tokens.prompt_tokens
    return [[prompt[at : at + width].tolist() for at in range(0, len(prompt), width)], *later]
