"""Texts of requests to tokens and back, in threads if long or many."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from engine.frontend.served_model import ServedModel
from service.http.bodies import MAX_VALUES
from service.http.errors import bad_field
from service.waiter import Aside

INLINE_CHARS = 2000  # shorter texts are tokenized inline: cheaper than a thread switch
GROUP_CHARS = 64 << 10  # of short texts per thread job, so that other requests get in between
HUGE_CHARS = 1 << 20  # such a text takes a second; only these wait for one another
# Per text, or `BYTES_PER_TOKEN` per token of a longer context: tokenizing takes some 70 times its memory.
MAX_TEXT_BYTES = 8 << 20
BYTES_PER_TOKEN = 8


class Texts:
    """Tokenizes and renders the texts of one model. `context_length`: in tokens."""

    def __init__(self, model: ServedModel, *, context_length: Callable[[], int]) -> None:
        self._model = model
        self._context_length = context_length
        self.tokenizing = Aside("tokenize", inline=INLINE_CHARS, huge=HUGE_CHARS, threads=2)
        self.rendering = Aside("render", inline=64 << 10, huge=1 << 20)

    @property
    def max_bytes(self) -> int:
        return max(MAX_TEXT_BYTES, BYTES_PER_TOKEN * self._context_length())

    def check_bytes(self, num_bytes: int, *, field: str) -> None:
        """Raises ApiError(400)."""
        if num_bytes > self.max_bytes:
            most = f"at most {self.max_bytes} are tokenized"
            raise bad_field(field, f"has {num_bytes} bytes of text; {most}; shorten it")

    def close(self) -> None:
        self.tokenizing.close()
        self.rendering.close()

    async def encode_all(
        self, texts: Iterable[str], *, field: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[list[int]]:
        """Tokenize texts, long or many in threads. Raises ApiError(400) naming `field`.

        Raises TooManyTokens above `most`, before tokenizing if the length suffices.
        """
        found, num_tokens = list[list[int]](), 0
        for group in _groups(texts):
            work = partial(self._encode_group, group, field=field, add_special_tokens=add_special_tokens, most=most)
            try:
                found += await self.tokenizing.run(work, size=sum(map(len, group)))
            except ValueError as e:
                raise bad_field(field, str(e)) from None
            num_tokens += sum(map(len, found[-len(group) :]))
            if num_tokens > MAX_VALUES:
                raise bad_field(field, f"one request may hold at most {MAX_VALUES} tokens of text; send fewer texts")
        return found

    def _encode_group(
        self, texts: list[str], *, field: str, add_special_tokens: bool, most: int | None
    ) -> list[list[int]]:
        encode = self._model.tokenizer.encode
        for text in texts:
            self._check_length(text, field=field, most=most)
        return [encode(text, add_special_tokens=add_special_tokens, most=most) for text in texts]

    def _check_length(self, text: str, *, field: str, most: int | None) -> None:
        """Raises TooManyTokens, or ApiError(400) for a text too long to tokenize."""
        if most is not None:
            self._model.tokenizer.check_length(text, most)
        if len(text) * 4 > self.max_bytes:
            self.check_bytes(len(text.encode(errors="surrogatepass")), field=field)

    async def decode_all(self, lists: Sequence[list[int]], *, skip_special_tokens: bool) -> list[str]:
        decode, size = self._model.tokenizer.decode, sum(map(len, lists))
        return await self.tokenizing.run(
            lambda: [decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists], size=size
        )


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group, size = list[str](), 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group
