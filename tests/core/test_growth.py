"""What is learned from ended answers, and the peak of growth, by literals."""

from engine.core.growth import FEWEST, WINDOW, MeasuredGrowth
from engine.core.request import Request
from engine.sampling_params import SamplingParams


def request_of(*, prompt: int, generated: int, limit: int) -> Request:
    request = Request(
        rid="r",
        input_ids=list(range(prompt)),
        sampling=SamplingParams(max_new_tokens=limit),
        eos_ids=frozenset(),
        arrived_s=0.0,
    )
    request.output_ids = [0] * generated
    return request


def learned(*lengths: int) -> MeasuredGrowth:
    growth = MeasuredGrowth()
    for length in lengths:
        growth.note_end(length)
    return growth


def test_a_request_ends_where_a_third_of_the_longer_answers_ended() -> None:
    growth = learned(10, 20, 30, 40)
    assert growth.remaining(request_of(prompt=5, generated=0, limit=100)) == 20
    assert learned(10, 20, 30, 40, 50, 60).remaining(request_of(prompt=5, generated=0, limit=100)) == 30
    assert growth.remaining(request_of(prompt=5, generated=25, limit=100)) == 5
    assert growth.remaining(request_of(prompt=5, generated=0, limit=12)) == 12  # not past its own limit
    assert growth.remaining(request_of(prompt=5, generated=40, limit=100)) == 60  # longer than all that was seen


def test_the_peak_counts_what_those_that_end_give_back() -> None:
    """Ten tokens each: one grows by 30; the other has ended by then and gave its 20 + 2 back."""
    growth = learned(*[30] * FEWEST)
    long, short = request_of(prompt=10, generated=0, limit=30), request_of(prompt=20, generated=0, limit=2)
    assert growth.peak_tokens([long], floor=0) == 30
    assert growth.peak_tokens([long, short], floor=0) == 10  # 40 held at the end, 30 now; 34 when the short one ends
    assert growth.peak_tokens([long, long], floor=0) == 60
    assert growth.peak_tokens([request_of(prompt=1, generated=29, limit=99)], floor=50) == 50


def test_old_answers_are_forgotten() -> None:
    growth = learned(*[1000] * WINDOW, *[5] * WINDOW)
    assert growth.remaining(request_of(prompt=1, generated=0, limit=2000)) == 5
    assert not learned(*[5] * (FEWEST - 1)).known and learned(*[5] * FEWEST).known
