"""DESIGN.md section 5 holds at every step of at least 10,000, whatever arrives when, in every role of the core.

Of each kind of engine `make test` plays the first third of the stories, or half of them, at least 1,250 steps, and `make slow-tests` all 10,000.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from tests.core.proof.driver import play
from tests.core.proof.shares import Share, halves, shares
from tests.core.proof.story import (
    Story,
    rushes,
    stories,
    stories_with_a_drafter,
    stories_with_adapters,
    stories_with_drafts,
    stories_with_groups,
    stories_with_images,
    stories_with_lanes,
    stories_with_states_and_drafts,
)
from tools.mutants.__main__ import find

PLANTED = ("memory goes back while a step may write it",)
EXAMPLES = 210
# What so many stories must have shown, or they prove little.
LEAST = {
    "requests": 1500,
    "tokens": 4000,
    "chunks": 1000,
    "cached_tokens": 200,
    "mixed": 50,
    "overlapped": 2000,
    "masks": 1000,
    "piped": 300,
    "retractions": 50,
    "restored_tokens": 50,
    "wasted_samples": 50,
    "updates": 5,
    "end:stop-0": 100,
    "end:length-0": 500,
    "end:abort-500": 10,
    "role:unified": 25,
    "role:prefill": 25,
    "role:decode": 25,
}


def seen_in(drawn: SearchStrategy[Story], *, examples: int) -> Counter[str]:
    """Play fixed examples (derandomized); `make soak-core` draws others."""
    seen: Counter[str] = Counter()

    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(story=drawn)
    def drive(story: Story) -> None:
        seen.update(play(story).tally())

    drive()
    return seen


@halves
def test_steps_of_anything(share: Share) -> None:
    share.must_show(seen_in(stories(), examples=share.of(EXAMPLES)), LEAST)


def test_rushes_of_any_priority() -> None:
    """More requests than there is memory for: no preemption is in vain, and every answer is right."""
    seen = seen_in(rushes(), examples=60)
    assert seen["preemptions"] >= 20 and seen["retractions"] > seen["preemptions"], seen


# By what a model's layers remember beside pages of all tokens.
OF_STATES = {"snapshots": 150, "begun_from_snapshots": 25, "unannounced": 1000}
OF_WINDOWS = {"window_pages_retired": 300, "unannounced": 1000}
OF_GROUPS = {"retractions": 30, "preemptions": 10, "overlapped": 2000}


@shares
def test_steps_with_recurrent_states(share: Share) -> None:
    """Every step finds the state of exactly its tokens; snapshots are of the tokens of their node."""
    seen = seen_in(stories_with_groups(states=True), examples=share.of(EXAMPLES))
    share.must_show(seen, {**OF_GROUPS, **OF_STATES, "updates": 5})


@shares
def test_steps_with_windows(share: Share) -> None:
    """Every step finds the KV of its window in the pages of the window's own pool, however few these are."""
    seen = seen_in(stories_with_groups(windows=True), examples=share.of(EXAMPLES))
    share.must_show(seen, {**OF_GROUPS, **OF_WINDOWS, "cached_tokens": 300})


@shares
def test_steps_with_states_and_windows(share: Share) -> None:
    """Both at once: a prefix is used where both are there."""
    seen = seen_in(stories_with_groups(states=True, windows=True), examples=share.of(EXAMPLES))
    share.must_show(seen, {**OF_GROUPS, **OF_STATES, **OF_WINDOWS})


@shares
def test_steps_with_drafts(share: Share) -> None:
    """Right, wrong and in turn, past the end of an answer, at any depth: each request gets the tokens of plain decoding."""
    seen = seen_in(stories_with_drafts(), examples=share.of(EXAMPLES + 30))
    share.must_show(
        seen, {"retractions": 30, "overlapped": 500, "accepted_drafts": 1000, "rejected_drafts": 1000, "masks": 200}
    )


@halves
def test_steps_with_a_drafter(share: Share) -> None:
    """A model in the executor: whatever happens to a request, what the drafter keeps of its tokens is that of its prefix."""
    seen = seen_in(stories_with_a_drafter(), examples=share.of(EXAMPLES - 50))
    least = {
        "retractions": 30,
        "overlapped": 100,
        "draft_steps": 300,
        "accepted_drafts": 500,
        "rejected_drafts": 500,
        "restored_tokens": 100,
    }
    share.must_show(seen, {**least, "cached_tokens": 300, "masks": 100, "mixed": 50})


@halves
def test_steps_with_states_and_drafts(share: Share) -> None:
    """Every step finds the state of exactly its tokens, whatever drafts have made of it; so do the host's copies and the snapshots."""
    seen = seen_in(stories_with_states_and_drafts(), examples=share.of(EXAMPLES + 30))
    least = {"retractions": 30, "overlapped": 500, "restored_tokens": 100, "draft_steps": 100, "rewinds": 300}
    share.must_show(seen, {**least, **OF_STATES, "accepted_drafts": 700, "rejected_drafts": 700})


@shares
def test_steps_with_adapters_in_namespaces(share: Share) -> None:
    """No request reads KV of another adapter or namespace, with states and windows, and no step has more adapters than there is room for."""
    seen = seen_in(stories_with_adapters(states=True, windows=True), examples=share.of(EXAMPLES))
    share.must_show(seen, {**OF_GROUPS, "adapters_together": 300, "in_namespaces": 500, "cached_tokens": 100})


@shares
def test_steps_with_images(share: Share) -> None:
    """Whatever is cut, cached, retracted or forgotten: each token of an image is computed from its features, at its RoPE position."""
    seen = seen_in(stories_with_images(), examples=share.of(EXAMPLES))
    share.must_show(
        seen, {"encoded": 500, "feature_hits": 100, "feature_evictions": 100, "cut_images": 100, **OF_GROUPS}
    )


@shares
def test_steps_of_two_lanes(share: Share) -> None:
    """Whichever phase is planned, run or collected next: a request changes lanes with all its KV, and no step sees that of another."""
    seen = seen_in(stories_with_lanes(), examples=share.of(EXAMPLES))
    share.must_show(seen, {**OF_GROUPS, "beside": 2000, "cached_tokens": 200, "masks": 300, "updates": 5})


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    """One that shows within a second or two; the others: make mutants."""
    assert find("core", name)
