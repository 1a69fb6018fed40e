"""Stop regexes: which are taken, and that a client never sees text that one of them takes away."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.finish import check_finish
from engine.messages import FinishReason
from engine.sampling_params import InvalidParam, SamplingParams, check_sampling_params
from engine.text.incremental import RequestText
from engine.text.stop_regex import MAX_REACH, StopRegex, compile_all
from tests.core.engine_in_a_test import request_of
from tests.text.test_incremental import byte_level, letters

STARS = "x*y"


def request(*patterns: str, stop: tuple[str, ...] = (), no_stop_trim: bool = False) -> RequestText:
    options = {"stop": stop, "stop_regex": patterns, "no_stop_trim": no_stop_trim}
    return RequestText(byte_level(), prompt_tail=[], skip_special_tokens=True, **options)  # type: ignore[arg-type]


def ended_by(pattern: str) -> FinishReason:
    return FinishReason(kind="stop", matched=pattern, regex=True)


def test_text_is_held_back_by_the_length_of_a_match_less_one() -> None:
    r = request("b[cd]e")
    assert [r.push(letters(c)) for c in "abcxbd"] == ["", "", "a", "b", "c", "x"]
    assert r.push(letters("eq"), ended_by("b[cd]e")) == ""
    r = request("b[cd]e")
    assert r.push(letters("abc")) + r.push([], FinishReason(kind="length")) == "abc"


def test_the_longer_of_stop_string_and_regex_decides() -> None:
    r = request("[bc]", stop=("abcd",))
    assert [r.push(letters(c)) for c in "abc"] == ["", "", ""]
    assert r.push(letters("x")) == "abcx"


def test_the_match_that_ended_the_request_is_cut_not_one_that_was_let_through() -> None:
    r = request("xx")
    assert r.push(letters("axxb")) == "axx"  # min_new_tokens let it through
    assert r.push(letters("xx"), ended_by("xx")) == "b"


def test_anchors_see_what_was_given_out() -> None:
    r = request("^a")
    assert r.push(letters("ba")) == "ba"
    assert r.push(letters("a"), ended_by("^a")) == "a", "no match: nothing is cut"
    r = request(r"\bc")
    assert [r.push(letters(c)) for c in "ab"] == ["a", "b"]
    assert r.push(letters("c-c"), ended_by(r"\bc")) == "c-"


def test_a_match_of_any_length_is_cut_as_far_as_it_may_reach() -> None:
    text = "ab" + "x" * (MAX_REACH - 1)
    r = request(STARS)
    given_out = "".join(r.push(letters(c)) for c in text)
    assert given_out == "ab"
    assert r.push(letters("y"), ended_by(STARS)) == ""


def test_without_trimming_nothing_is_held_and_nothing_cut() -> None:
    r = request("b+c", stop=("abc",), no_stop_trim=True)
    assert [r.push(letters(c)) for c in "ab"] == ["a", "b"]
    assert r.push(letters("cq"), ended_by("b+c")) == "cq"
    r = request(no_stop_trim=True)
    assert r.push(letters("ab"), FinishReason(kind="stop", matched=letters("b")[0])) == "ab"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=40),
    pattern=st.sampled_from(["a{2,4}", "ab?c", "(ab|ba)c", "c$", "[ab]{3}c", "b+c", r"\bc+"]),
    stop=st.sampled_from([(), ("cab",), ("cc", "abab")]),
    size=st.integers(1, 4),
)
def test_scheduler_and_detokenizer_agree(text: str, pattern: str, stop: tuple[str, ...], size: int) -> None:
    """Token by token: the answer is the text up to the first match, and what was shown before is a part of it."""
    judged = request_of([1], max_new_tokens=1000, stop=stop, stop_regex=(pattern,))
    judged.stop_patterns = compile_all((pattern,))
    shown, seen = request(pattern, stop=stop), ""
    for at in range(0, len(text), size):
        part = text[at : at + size]
        judged.output_ids.append(at)
        upto = text[: at + size]
        reason = check_finish(judged, bad=False, tail_texts=lambda ids, skip, upto=upto: (upto,))  # type: ignore[misc]
        seen += shown.push(letters(part), reason)
        if reason is not None:
            matched = str(reason.matched)
            cut = StopRegex(matched).begin(upto, start=0, beyond=at) if reason.regex else upto.find(matched)
            assert seen == upto[:cut]
            return
    seen += shown.push([], FinishReason(kind="length"))
    assert seen == text


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
        regex.found(text, 0)
    assert not regex.found("!" * 50, 0)
