"""The forecast of a prompt's wait, with literals only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.client.forecast import HALF_LIFE_S, MIN_STARTED, PrefillForecast


def measured(rate: float) -> PrefillForecast:
    """Prompts of 100 tokens, one after the other, at `rate` tokens a second."""
    forecast, now_s = PrefillForecast(), 0.0
    for i in range(2 * MIN_STARTED):
        forecast.add(f"p{i}", 100, now_s)
        now_s += 100 / rate
        forecast.start(f"p{i}", now_s)
    return forecast


def test_nothing_is_known_before_some_prompts_have_begun() -> None:
    forecast = PrefillForecast()
    for i in range(MIN_STARTED):
        assert forecast.wait_s(1, float(i)) is None
        forecast.add(f"p{i}", 10, float(i))
        forecast.start(f"p{i}", i + 0.5)
    assert forecast.wait_s(1, 99.0) is not None


@pytest.mark.parametrize("rate", [1.0, 2000.0])
def test_the_wait_is_what_is_queued_and_the_prompt_itself_over_the_rate(rate: float) -> None:
    forecast = measured(rate)
    now_s = 2 * MIN_STARTED * 100 / rate
    assert forecast.rate(now_s) == pytest.approx(rate, rel=0.5 if rate < 10 else 1e-3)
    exact = forecast.rate(now_s)
    assert exact is not None
    forecast.add("long", 5000, now_s)
    assert forecast.queued_tokens == 5000
    assert forecast.wait_s(1000, now_s) == pytest.approx(6000 / exact)
    forecast.drop("long", now_s)
    assert forecast.wait_s(1000, now_s) == pytest.approx(1000 / exact)


def test_rest_does_not_count_and_a_standstill_does() -> None:
    forecast = measured(1000.0)
    before = forecast.rate(1.0)
    assert forecast.rate(10_000.0) == before  # nobody waited
    forecast.add("stuck", 100, 10_000.0)
    after = forecast.rate(10_000.0 + HALF_LIFE_S)
    assert before is not None and after is not None and after < before / 10


def test_a_name_that_is_not_queued_changes_nothing() -> None:
    forecast = measured(1000.0)
    before = forecast.rate(1.0)
    forecast.start("unknown", 1.0)
    forecast.start("p0", 1.0)  # its second output
    forecast.drop("unknown", 1.0)
    assert forecast.rate(1.0) == before and forecast.queued_tokens == 0


@given(
    st.lists(st.tuples(st.sampled_from("asd"), st.integers(0, 5), st.integers(0, 300), st.floats(0, 5)), max_size=60)
)
def test_counts_never_drift(events: list[tuple[str, int, int, float]]) -> None:
    forecast, now_s, queued = PrefillForecast(), 0.0, dict[str, int]()
    for what, number, tokens, passed_s in events:
        now_s += passed_s
        name = str(number)
        if what == "a" and name not in queued:
            forecast.add(name, tokens, now_s)
            queued[name] = max(1, tokens)
        elif what == "s":
            forecast.start(name, now_s)
            queued.pop(name, None)
        elif what == "d":
            forecast.drop(name, now_s)
            queued.pop(name, None)
        assert forecast.queued_tokens == sum(queued.values())
        wait_s = forecast.wait_s(1, now_s)
        assert wait_s is None or wait_s >= 0.0
