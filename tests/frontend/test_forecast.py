"""The forecast of a prompt's wait, with literals only."""

import pytest

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
    alone_s = wait_s(forecast, now_s)
    assert 1000 / alone_s == pytest.approx(rate, rel=0.5 if rate < 10 else 1e-3)
    forecast.add("long", 5000, now_s)
    assert wait_s(forecast, now_s) == pytest.approx(6 * alone_s)
    forecast.drop("long", now_s)
    assert wait_s(forecast, now_s) == pytest.approx(alone_s)


def test_rest_does_not_count_and_a_standstill_does() -> None:
    forecast = measured(1000.0)
    before_s = wait_s(forecast, 1.0)
    assert wait_s(forecast, 10_000.0) == before_s  # nothing waited
    forecast.add("stuck", 100, 10_000.0)
    assert wait_s(forecast, 10_000.0 + HALF_LIFE_S) > 10 * before_s


def test_a_name_that_is_not_queued_changes_nothing() -> None:
    forecast = measured(1000.0)
    before_s = wait_s(forecast, 1.0)
    forecast.start("unknown", 1.0)
    forecast.start("p0", 1.0)  # its second output
    forecast.drop("unknown", 1.0)
    assert wait_s(forecast, 1.0) == before_s


def wait_s(forecast: PrefillForecast, now_s: float) -> float:
    found_s = forecast.wait_s(1000, now_s)
    assert found_s is not None
    return found_s
