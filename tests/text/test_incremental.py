"""Incremental text: no broken character, nothing of a stop string, and all deltas together are the full decode."""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from engine.messages import FinishReason, GenerateRequest, LogprobOptions, TokenLogprob, TokenOutput
from engine.sampling_params import SamplingParams, TextParams
from engine.text.incremental import BROKEN, IncrementalText, RequestText, SampleText, StopScanner, places_of
from engine.text.tokenizer import Tokenizer

CORPUS = [
    "hello world, the quick brown fox", "多字节 字符 你好世界", "🎉🎊👩‍👩‍👧‍👦 naïve café", "żółć ĞğİıŞş", "a  b   c\n\n\td",
]  # fmt: skip


@cache
def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    args: Any = {"vocab_size": 330, "initial_alphabet": letters, "special_tokens": ["<|end|>"], "show_progress": False}
    trainer = trainers.BpeTrainer(**args)
    backend.train_from_iterator(CORPUS * 3, trainer)
    return Tokenizer(backend)


@cache
def sentence_piece() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁hello", "▁world", "a", "b", "▁a"]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend)


@cache
def word_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "k1": 1, "v1": 2, "v2": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<|assistant|>", special=True)])
    return Tokenizer(backend)


def tid(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None
    return token_id


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    text = IncrementalText(tokenizer, prompt_remainder=[], skip_special_tokens=True)
    edges = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    return [text.push(ids[a:b]) for a, b in itertools.pairwise(edges)]


TEXTS = st.text(alphabet=st.sampled_from("ab 你好🎉👩‍👧é\n<|end|>ż "), max_size=60) | st.text(max_size=40)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 500), max_size=30))
def test_deltas_of_valid_text_are_the_text_and_never_broken(text: str, cuts: list[int]) -> None:
    t = byte_level()
    ids = t.encode(text)
    deltas = stream(t, ids, cuts) if cuts else stream(t, ids, list(range(len(ids))))
    assert "".join(deltas) == t.decode(ids)
    assert BROKEN in text or not any(BROKEN in d for d in deltas)


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.integers(0, 329), max_size=120), cuts=st.lists(st.integers(0, 500), max_size=120))
def test_deltas_of_any_ids_are_the_full_decode_without_an_unfinished_end(data: list[int], cuts: list[int]) -> None:
    t = byte_level()
    full = t.decode(data)
    want = full[:-1] if t.num_open_bytes(data) else full
    assert "".join(stream(t, data, cuts)) == want


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab你🎉 é", max_size=60))
def test_byte_fallback_tokens_are_whole_characters_too(text: str) -> None:
    t = sentence_piece()
    plain = {" ": tid(t, "▁"), "a": tid(t, "a"), "b": tid(t, "b")}
    ids = [i for c in text for i in ([plain[c]] if c in plain else [tid(t, f"<0x{b:02X}>") for b in c.encode()])]
    deltas = stream(t, ids, list(range(len(ids))))
    assert "".join(deltas) == t.decode(ids)
    assert not any(BROKEN in d for d in deltas)


def test_endless_broken_bytes_are_given_out_at_once_and_the_window_stays_small() -> None:
    t = byte_level()
    bad = tid(t, "ÿ")  # byte 0xff
    text = IncrementalText(t, prompt_remainder=[], skip_special_tokens=True)
    assert all(text.push([bad]) == BROKEN for _ in range(1000))
    assert len(text._window) <= 300


def test_space_before_the_first_word_comes_from_the_prompt() -> None:
    def push(t: Tokenizer, tail: list[int], ids: list[int]) -> str:
        return IncrementalText(t, prompt_remainder=tail, skip_special_tokens=True).push(ids)

    t, w = sentence_piece(), word_level()
    hello, s = tid(t, "▁hello"), tid(t, "<s>")
    assert push(t, [hello], [hello, hello]) == " hello hello"
    assert push(t, [], [hello, hello]) == push(t, [hello, s], [hello, hello]) == "hello hello"
    assert push(w, [1, tid(w, "<|assistant|>")], [2, 3]) == "v1 v2"


def test_special_tokens_in_the_middle_do_not_eat_spaces() -> None:
    t = sentence_piece()
    hello, s = tid(t, "▁hello"), tid(t, "<s>")
    ids = [hello, *([s] * 100), hello]
    assert "".join(stream(t, ids, list(range(len(ids))))) == "hello hello"


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=3),
)
def test_scanner_holds_the_longest_possible_beginning(text: str, stops: list[str]) -> None:
    scanner = StopScanner(tuple(stops))
    for c in text:
        scanner.push(c)
    want = max((k for s in stops for k in range(len(s) + 1) if text.endswith(s[:k])), default=0)
    assert scanner.held == want


def request(stop: tuple[str, ...] = (), tokenizer: Tokenizer | None = None, skip: bool = True) -> RequestText:
    params = TextParams(stop=stop, skip_special_tokens=skip)
    return RequestText(tokenizer or byte_level(), params, prompt_remainder=[])


def letters(text: str) -> list[int]:
    return [tid(byte_level(), c) for c in text]


def test_what_may_become_a_stop_string_is_held_and_then_trimmed_or_given() -> None:
    r = request(("xyz", "zw"))
    assert [r.push(letters(c)) for c in "axyaz"] == ["a", "", "", "xya", ""]
    assert r.push(letters("w"), FinishReason(kind="stop", matched="zw", trim=2)) == ""
    r = request(("xyz",))
    assert [r.push(letters(c)) for c in "axy"] == ["a", "", ""]
    assert r.push([], FinishReason(kind="length")) == "xy"


def test_the_scheduler_says_how_much_of_the_text_is_trimmed() -> None:
    r, ended = request(("xx",)), FinishReason(kind="stop", matched="xx", trim=3)
    assert r.push(letters("axx")) + r.push(letters("b")) + r.push(letters("xxq"), ended) == "axxb"
    r = request(("xx",))
    assert r.push(letters("axx")) == "a"  # all of a stop string, but min_new_tokens let it through
    assert r.push(letters("bxxq"), ended) == "xxb"


def test_a_stop_token_is_not_part_of_the_text() -> None:
    end = tid(byte_level(), "<|end|>")
    assert request(skip=False).push([*letters("a"), end], FinishReason(kind="stop", matched=end)) == "a"
    assert request(skip=False).push([*letters("a"), end], FinishReason(kind="length")) == "a<|end|>"
    b = letters("b")
    assert request().push([*letters("a"), *b], FinishReason(kind="stop", matched=b[0])) == "a"


def test_an_unfinished_character_is_dropped_at_the_end() -> None:
    ids = [tid(byte_level(), c) for c in "aðŁ"]  # a, then two of four bytes of an emoji
    assert request().push(ids, FinishReason(kind="length")) == "a"


def test_a_prompt_that_ends_inside_a_character_lends_its_beginning() -> None:
    """With SentencePiece a window that begins inside an older character would spoil all bytes that follow it."""
    for t in (byte_level(), sentence_piece()):
        ids = [byte_id(t, b) for b in "鬱蠱龘靐".encode()]
        for k in range(len(ids) + 1):
            text = IncrementalText(t, prompt_remainder=ids[max(0, k - 8) : k], skip_special_tokens=True)
            assert "".join(text.push([i]) for i in ids[k:]) == "鬱蠱龘靐"[k // 3 :]


def test_tokens_have_their_places_in_the_text() -> None:
    t, s = byte_level(), sentence_piece()
    ids = [byte_id(t, b) for b in "é x".encode()]
    assert places_of(t, ids, "é x") == [(0, 0), (0, 1), (1, 2), (2, 3)]
    end = tid(t, "<|end|>")
    assert places_of(t, [end, *letters("a"), end], "a<|end|>") == [(0, 0), (0, 1), (1, 8)]
    bos, hello = tid(s, "<s>"), tid(s, "▁hello")
    assert places_of(s, [bos, hello, hello], "hello hello") == [(0, 0), (0, 5), (5, 11)]
    assert places_of(t, letters("ab"), "AB") == [(0, 1), (1, 2)], "a tokenizer that makes capitals small"
    assert places_of(t, letters("abc"), "a") == [(0, 1), (1, 1), (1, 1)]


def byte_id(t: Tokenizer, byte: int) -> int:
    return next(i for i in range(t.vocab_size) if t.token_bytes(i) == bytes([byte]) and i not in t.special_ids)


@pytest.mark.parametrize("make", [byte_level, sentence_piece, word_level])
def test_token_texts_and_bytes(make: Callable[[], Tokenizer]) -> None:
    t = make()
    for i in range(t.vocab_size):
        assert isinstance(t.token_text(i), str) and isinstance(t.token_bytes(i), bytes)
    assert t.token_text(10**6) == "" and t.token_bytes(10**6) == b""


def test_bytes_of_split_characters_join_to_the_text() -> None:
    t = byte_level()
    ids = t.encode("naïve 🎉 你")
    assert b"".join(t.token_bytes(i) for i in ids).decode() == "naïve 🎉 你"
    s = sentence_piece()
    assert s.token_bytes(tid(s, "<0xE4>")) == b"\xe4"
    assert s.token_text(tid(s, "▁hello")) == " hello"


def sample(*, stop: tuple[str, ...] = ()) -> SampleText:
    return SampleText(byte_level(), GenerateRequest(rid="r", input_ids=[], sampling=SamplingParams(stop=stop)))


def test_an_output_has_its_text_and_those_of_its_logprobs() -> None:
    text = sample(stop=("zz",))
    a, z = letters("az")
    logprobs = [TokenLogprob(logprob=-1.0, token_id=a, top=[(-1.0, a), (-2.0, z)])]
    out = text.read(TokenOutput(rid="r", new_ids=[a, z], logprobs=logprobs))
    assert out.text == "a" and out.logprob_texts == [("a", ["a", "z"])] and out.logprob_spans == [(0, 1), (1, 2)]
    out = text.read(TokenOutput(rid="r", new_ids=[], finish=FinishReason(kind="abort")))
    assert out.text == "z"


def test_spans_go_on_where_text_is_held_back_and_part_of_a_character_has_no_width() -> None:
    text, (z,) = sample(stop=("zz",)), letters("z")
    ids = [z, *(byte_id(byte_level(), b) for b in "é".encode()), z]
    spans = []
    for token in ids:
        spans += text.read(TokenOutput(rid="r", new_ids=[token], logprobs=[TokenLogprob(-1.0, token)])).logprob_spans
    assert spans == [(0, 1), (1, 1), (1, 2), (2, 3)]


def test_only_the_first_token_of_an_answer_lacks_its_leading_space() -> None:
    t = sentence_piece()
    hello, world, s = tid(t, "▁hello"), tid(t, "▁world"), tid(t, "<s>")
    for prompt, first in (([s], "hello"), ([hello], " hello")):
        asked = GenerateRequest(rid="r", input_ids=prompt, sampling=SamplingParams(), logprobs=LogprobOptions())
        logprobs = [TokenLogprob(-1.0, i, top=[(-1.0, hello), (-2.0, world)]) for i in (hello, hello)]
        out = SampleText(t, asked).read(TokenOutput(rid="r", new_ids=[hello, hello], logprobs=logprobs))
        assert [text for text, _ in out.logprob_texts] == [first, " hello"] and out.text == first + " hello"
        assert out.logprob_texts[0][1] == [first, first.replace("hello", "world")]


def test_an_impossible_id_has_no_text() -> None:
    (a,) = letters("a")
    assert sample().read(TokenOutput(rid="r", new_ids=[-5])).text == ""
    assert sample().read(TokenOutput(rid="r", new_ids=[a, 10**6], finish=FinishReason(kind="length"))).text == "a"
