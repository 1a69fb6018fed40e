"""Stop regexes: which are taken, and that their search takes linear time."""

import random

import pytest

from engine.sampling_params import InvalidParam, SamplingParams, check_sampling_params
from engine.text.stop_regex import compile_all


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
