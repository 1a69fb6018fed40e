"""All live requests of the detokenizer: messages in, one `TextBatch` per `TokenBatch` out. Pure.

Owns the per-request text state, from `RequestOpened` to the output that finishes the request.
"""

import logging

from engine.detokenizer.incremental import RequestText
from engine.frontend.tokenizer import Tokenizer
from engine.messages import RequestOpened, TextBatch, TextOutput, TokenBatch, TokenLogprob, TokenOutput
from telemetry.logs import about

log = logging.getLogger(__name__)

MAX_LIVE = 1 << 18  # far above what a frontend lets live


class Detokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._live: dict[str, RequestText] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    def handle(self, message: RequestOpened | TokenBatch) -> TextBatch | None:
        """Take one message; a `TokenBatch` gives the batch to send on."""
        if isinstance(message, RequestOpened):
            self._make_room()
            self._live[message.rid] = self._open(message)
            return None
        return TextBatch(outputs=[self._text_output(o) for o in message.outputs])

    def _make_room(self) -> None:
        """The scheduler ends whatever it opens; should it not, the oldest goes."""
        if len(self._live) >= MAX_LIVE:
            rid = next(iter(self._live))
            log.error("%d requests are live: the state of %s is dropped", len(self._live), rid, extra=about(rid=rid))
            del self._live[rid]

    def _open(self, m: RequestOpened) -> RequestText:
        return RequestText(
            self._tokenizer,
            prompt_tail=m.prompt_tail,
            stop=m.stop,
            skip_special_tokens=m.skip_special_tokens,
            stop_regex=m.stop_regex,
            no_stop_trim=m.no_stop_trim,
        )

    def _text_output(self, o: TokenOutput) -> TextOutput:
        text = self._push(o)
        if o.finish is not None:
            self._live.pop(o.rid, None)
        return TextOutput(
            text=text,
            tokens=o,
            logprob_texts=[self._texts(lp) for lp in o.logprobs],
            input_logprob_texts=[self._texts(lp) for lp in o.input_logprobs],
        )

    def _push(self, o: TokenOutput) -> str:
        state = self._live.get(o.rid)
        if state is None:  # its opening was lost (or the request failed before it was admitted)
            self._make_room()
            state = self._open(RequestOpened(rid=o.rid, prompt_tail=[], stop=(), skip_special_tokens=True))
            self._live[o.rid] = state
        try:
            return state.push(o.new_ids, o.finish)
        except (OverflowError, ValueError) as e:  # an id that no tokenizer can have: only this request suffers
            log.error("request %s: cannot decode %s: %s", o.rid, o.new_ids[:8], e, extra=about(rid=o.rid))
            return ""

    def _texts(self, lp: TokenLogprob) -> tuple[str, list[str]]:
        text = self._tokenizer.token_text
        return text(lp.token_id), [text(token_id) for _, token_id in [*lp.top, *lp.asked]]
