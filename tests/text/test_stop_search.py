"""Stop strings and regexes end an answer exactly where its whole text has them first; which regexes are taken.

A client sees the text before, whole and streamed, and the search takes linear time.
"""

import codecs
import random
import re

import pytest
import re2  # type: ignore[import-untyped]
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.messages import FinishReason, GenerateRequest, TokenOutput
from engine.sampling_params import InvalidParam, SamplingParams, check_sampling_params
from engine.text.incremental import MAX_REACH, SampleText, StopSearch, compile_all
from engine.text.tokenizer import Tokenizer
from tests.text.test_incremental import byte_id, byte_level, letters, sentence_piece, tid

PIECES = ["鬱", "蠱", "龘", "你", "🫠", "🧬", "👩‍👧", "e\u0301", "é", "ż", "a", "b", "ab", " ", "\n", "a b"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
PATTERNS = ["[鬱蠱]{2}", "龘.", "(?i)AB", r"\bb", "^ab", "🫠+", "a\u0301?b", "e\u0301", r"\s\S", "(你|ab){2}", "b$"]


def ids_of(t: Tokenizer, text: str, whole: list[bool]) -> list[int]:
    """Tokens of `text`, each either as the tokenizer has it or byte by byte."""
    plain = {"a": "a", "b": "b", " ": "▁"}  # of the characters that SentencePiece has
    ids = t.encode(text) if t.byte_level else [tid(t, plain[c]) if c in plain else -ord(c) for c in text]
    found: list[int] = []
    for n, i in enumerate(ids):
        data = chr(-i).encode() if i < 0 else t.token_bytes(i)
        keeps = i >= 0 and (not t.byte_level or whole[n % len(whole)])
        found += [i] if keeps else [byte_id(t, b) for b in data]
    return found


def text_of(t: Tokenizer, ids: list[int]) -> str:
    """The text of whole characters, and of bytes that begin none.

    CPython waits for the third byte of half a surrogate pair, which none completes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, waiting = decoder.decode(b"".join(map(t.token_bytes, ids))), decoder.getstate()[0]
    return text + "�" * len(waiting) if b"\xed\xa0" <= waiting < b"\xee" else text


def answer_of(t: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """What the answer adds to the prompt's text. SentencePiece's text has no space at its beginning."""
    text = text_of(t, prompt + ids)[len(text_of(t, prompt)) :]
    return text if t.byte_level or prompt else text.removeprefix(" ")


def begins(text: str, stop: tuple[str, ...], patterns: tuple[str, ...]) -> dict[str, int]:
    found = {s: text.find(s) for s in stop} | {
        p: match.start() for p in patterns if (match := re2.compile(p).search(text))
    }
    return {name: at for name, at in found.items() if at >= 0}


def first_stop(
    t: Tokenizer, prompt: list[int], ids: list[int], sampling: SamplingParams
) -> tuple[int, FinishReason] | None:
    """The number of tokens after which the scheduler ends the answer, which takes them one by one, also those of a draft."""
    search = StopSearch(t, prompt, sampling)
    for n in range(1, len(ids) + 1):
        if (reason := search.look(ids[:n])) is not None:
            return n, reason
    return None


def shown(t: Tokenizer, prompt: list[int], sampling: SamplingParams, parts: list[list[int]], end: FinishReason) -> str:
    """What a client has seen; nothing of it is taken back."""
    sample = SampleText(t, GenerateRequest(rid="r", input_ids=prompt, sampling=sampling))
    outputs = [TokenOutput(rid="r", new_ids=part) for part in parts] or [TokenOutput(rid="r", new_ids=[])]
    outputs[-1].finish = end
    return "".join(sample.read(output).text for output in outputs)


def parts_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    at = 0
    while at < len(ids):
        size = sizes[len(parts) % len(sizes)]
        parts.append(ids[at : at + size])
        at += size
    return parts


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    spm=st.booleans(),
    text=TEXTS,
    whole=st.lists(st.booleans(), min_size=1, max_size=5),
    other=st.text("ab鬱🫠", min_size=1, max_size=4),
    patterns=st.lists(st.sampled_from(PATTERNS), max_size=2, unique=True),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_an_answer_ends_where_the_whole_text_has_a_stop_first(
    data: st.DataObject,
    spm: bool,
    text: str,
    whole: list[bool],
    other: str,
    patterns: list[str],
    sizes: list[int],
) -> None:
    t = sentence_piece() if spm else byte_level()
    ids = ids_of(t, text, whole)
    cut = data.draw(st.integers(0, len(ids)), label="prompt")  # it may end within a character
    prompt, ids = ids[:cut], ids[cut:]
    a, b = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text))), label="stop"))
    stop = tuple(dict.fromkeys(s for s in (text[a:b], other) if s))
    regexes = (*patterns, *([re.escape(text[a:b])] if b - a > 2 else []))
    sampling = SamplingParams(stop=stop, stop_regex=regexes, max_new_tokens=1000)

    texts = [answer_of(t, prompt, ids[:n]) for n in range(len(ids) + 1)]
    want = next((n for n, so_far in enumerate(texts) if begins(so_far, stop, regexes)), None)
    found = first_stop(t, prompt, ids, sampling)
    assert (found and found[0]) == want
    end = FinishReason(kind="length") if found is None else found[1]
    seen = texts[-1]
    if want is not None:
        at = begins(texts[want], stop, regexes)
        ids, seen = ids[:want], texts[want][: min(at.values())]
        assert at[str(end.matched)] == len(seen)
    assert shown(t, prompt, sampling, [ids], end) == shown(t, prompt, sampling, parts_of(ids, sizes), end) == seen


@settings(max_examples=150, deadline=None)
@example(ids=[170, 95], stop=[])  # ED A1, which begin no character
@given(ids=st.lists(st.integers(1, 256), min_size=1, max_size=60), stop=st.lists(st.integers(1, 256), max_size=4))
def test_any_bytes_end_where_their_text_has_the_stop(ids: list[int], stop: list[int]) -> None:
    t = byte_level()
    name = text_of(t, stop) or "�"
    sampling = SamplingParams(stop=(name,))
    want = next((n for n in range(len(ids) + 1) if name in text_of(t, ids[:n])), None)
    found = first_stop(t, [], ids, sampling)
    assert (found and found[0]) == want
    if found is not None:
        text = text_of(t, ids[:want])
        assert shown(t, [], sampling, [[i] for i in ids[:want]], found[1]) == text[: text.index(name)]


def ends(text: str, *, first: int = 0, **sampling: object) -> tuple[int, int] | None:
    """(tokens, characters that are trimmed) where the answer of these letters ends. `first`: letters that were generated elsewhere."""
    search, ids = StopSearch(byte_level(), [], SamplingParams(**sampling)), letters(text)  # type: ignore[arg-type]
    for n in range(max(1, first), len(ids) + 1):
        if (reason := search.look(ids[:n])) is not None:
            return n, reason.trim
    return None


@pytest.mark.parametrize(
    ("text", "pattern", "end"),
    [
        ("abc", "^b", None),
        ("x" * 3000 + "abc", "^a", None),  # the window does not begin where the answer does
        ("x" * 3000 + "abc", r"\ba", None),
        ("abc", "c$", (3, 1)),
        ("ab", "b$", (2, 1)),
        ("a" + "-" * 200 + "b", "a-*b", (202, 202)),
        ("a" + "-" * (MAX_REACH - 2) + "b", "a-*b", (MAX_REACH, MAX_REACH)),
        ("a" + "-" * 2000 + "b", "a-*b", None),  # longer than a match may be
        ("STOP", "(?i)stop", (4, 4)),
    ],
)
def test_what_a_regex_sees(text: str, pattern: str, end: tuple[int, int] | None) -> None:
    assert ends(text, stop_regex=(pattern,)) == end


def test_a_stop_that_was_let_through_counts_no_more() -> None:
    """min_new_tokens let it through, or a worker before this one."""
    for sampling in ({"stop": ("xx",)}, {"stop_regex": ("xx",)}, {"stop_regex": ("x{2}",), "stop": ("zz",)}):
        assert ends("axxbxxq", first=4, **sampling) == (6, 2)
        assert ends("axxbbbbbb", first=4, **sampling) is None
        assert ends("axbxxq", first=2, **sampling) == (5, 2)
        assert ends("axx", first=3, **sampling) == (3, 2), "it ends in the first token that is looked at"


@pytest.mark.parametrize(
    ("stop", "skips", "text", "matched"),
    [
        ("a<|end|>", True, "x", True),  # a name is found where its token has no text
        ("<|end|>b", True, "xa", True),
        ("a<|end|>b", True, "x", True),
        ("ab", True, "x", True),  # as the client has it
        ("ab", False, "xa<|end|>bc", False),
        ("a<|end|>b", False, "x", True),
        (r"a<.*>b", True, "x", True),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_stops_around_special_tokens(stop: str, skips: bool, text: str, matched: bool, size: int) -> None:
    t = byte_level()
    ids = [*letters("xa"), tid(t, "<|end|>"), *letters("bc")]
    kind = {"stop_regex": (stop,)} if "*" in stop else {"stop": (stop,)}
    sampling = SamplingParams(skip_special_tokens=skips, **kind)  # type: ignore[arg-type]
    found = first_stop(t, [], ids, sampling)
    assert (found is not None) == matched
    n, end = found or (len(ids), FinishReason(kind="length"))
    assert shown(t, [], sampling, parts_of(ids[:n], [size]), end) == text


def test_without_trimming_nothing_is_held_and_nothing_cut() -> None:
    t = byte_level()
    sampling = SamplingParams(stop=("abc",), stop_regex=("b+c",), no_stop_trim=True)
    sample = SampleText(t, GenerateRequest(rid="r", input_ids=[], sampling=sampling))
    assert [sample.read(TokenOutput(rid="r", new_ids=letters(c))).text for c in "ab"] == ["a", "b"]
    end = FinishReason(kind="stop", matched="abc", trim=3)
    assert sample.read(TokenOutput(rid="r", new_ids=letters("c"), finish=end)).text == "c"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "missing )"),
        ("a)", "unbalanced"),
        ("[b-a]", "bad character range"),
        ("(?=a)", "invalid perl operator"),
        (r"(a)\1", "invalid escape"),
        ("(?P<n>a)(?P=n)", "RE2"),
        ("a{,3}", "{0,n}"),
        ("a*", "empty text"),
        ("$", "empty text"),
        ("[ab]{1,1000}c", "too large"),
        (r"\pL", "bad escape"),
        ("((a{100}){100}){100}", "RE2"),
        ("\ud800", "Unicode"),
    ],
)
def test_what_is_no_stop_regex_is_refused_by_name(pattern: str, words: str) -> None:
    with pytest.raises(InvalidParam, match=r"^stop_regex: ") as error:
        compile_all((pattern,))
    assert error.value.field == "stop_regex" and words in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("patterns", [("",), ("a" * 1025,), ("a",) * 9])
def test_their_number_and_length_are_bounded(patterns: tuple[str, ...]) -> None:
    with pytest.raises(InvalidParam, match=r"^stop_regex: "):
        check_sampling_params(SamplingParams(stop_regex=patterns), vocab_size=10)


HOSTILE = ["(a+)+$", "(a|a)*b", "(a|ab|aba)*c", "[ab]*a[ab]{400}c", "(?:a?){30}a{30}c", "(.*)*x"]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_hostile_pattern_is_refused_or_searched_in_linear_time(pattern: str) -> None:
    """A backtracking engine would not come back from one of these searches, let alone a hundred times."""
    try:
        (regex,) = compile_all((pattern,))
    except InvalidParam:
        return
    rng = random.Random(1)
    for _ in range(100):
        text = "".join(rng.choice("aab") for _ in range(400)) + "!"
        regex.begin(text, start=0, beyond=0)
    assert regex.begin("!" * 50, start=0, beyond=0) is None
