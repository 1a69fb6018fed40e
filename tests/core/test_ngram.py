"""Drafts by n-grams: the longest match counts, of equal ones the latest; text that repeats goes on."""

import pytest

from engine.speculative.drafts import NO_DRAFT
from engine.speculative.ngram import INDEXED_AT_ONCE, NgramIndex


def index_of(prompt: list[int], output: list[int]) -> NgramIndex:
    index = NgramIndex(2)
    index.read(prompt, output)
    return index


def test_what_followed_the_newest_tokens_is_drafted() -> None:
    draft = index_of([1, 2, 3, 4, 5, 6], [9, 2, 3]).draft(longest_match=8, most=10)
    assert (draft.tokens, draft.match) == ([4, 5], 2)


def test_the_longest_match_counts_and_drafts_more() -> None:
    """Behind 2, 3 stood 4 as well as 5; behind 1, 2, 3 stood 4."""
    draft = index_of([1, 2, 3, 4, 7, 2, 3, 5, 8], [1, 2, 3]).draft(longest_match=8, most=10)
    assert (draft.tokens, draft.match) == ([4, 7, 2], 3)
    assert index_of([1, 2, 3, 4, 7, 2, 3, 5, 8], [1, 2, 3]).draft(longest_match=2, most=10).tokens == [5, 8]


def test_of_equal_matches_the_latest_counts() -> None:
    assert index_of([2, 3, 4, 0, 2, 3, 5, 6], [2, 3]).draft(longest_match=8, most=1).tokens == [5]


def test_text_that_repeats_goes_on() -> None:
    assert index_of([7, 8, 9] * 3, []).draft(longest_match=32, most=5).tokens == [7, 8, 9, 7, 8]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_new_text_has_no_draft(tokens: list[int]) -> None:
    assert index_of(tokens, []).draft(longest_match=8, most=5) is NO_DRAFT


def test_the_answer_is_read_as_it_grows() -> None:
    index, output = index_of([1, 2, 3], []), [4, 1]
    index.read([1, 2, 3], output)
    output.append(2)
    index.read([1, 2, 3], output)
    assert index.draft(longest_match=8, most=5).tokens == [3, 4]


def test_a_long_prompt_is_read_in_parts() -> None:
    prompt = [*range(INDEXED_AT_ONCE + 100), INDEXED_AT_ONCE + 50, INDEXED_AT_ONCE + 51]
    index = index_of(prompt, [])
    assert index.draft(longest_match=8, most=5) is NO_DRAFT
    index.read(prompt, [])
    assert index.draft(longest_match=8, most=1).tokens == [INDEXED_AT_ONCE + 52]
