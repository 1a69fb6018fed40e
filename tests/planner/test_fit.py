"""The fit finds the cost model that made the records: the planner's own clusters are measured as a server would be."""

from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from deploy.bench.stats import RequestRecord
from planner.fit import fit, fit_handover, quiet_stretches, read_records
from planner.step_time import StepLoad
from service.flags import ConfigError
from tests.planner.planned import (
    CONTROL_S,
    LATENCY_S,
    LINK,
    OUTSIDE_S,
    PAGE_BYTES,
    PAGE_SIZE,
    STEP_TIME,
    cluster,
    request_at,
)

FOREVER = float("inf")


def one_after_another(name: str = "1U", *, link: float = LINK) -> list[RequestRecord]:
    requests = [request_at(i, 60 + 61 * (i * 7 % 20), 12, block=i) for i in range(20)]
    return cluster(name, link=link).run(requests, rate=1, until_s=FOREVER)


def together() -> list[RequestRecord]:
    requests = [request_at(i // 8, 40 + 50 * (i % 8), 60, block=i) for i in range(32)]
    return cluster("1U").run(requests, rate=2, until_s=FOREVER)


def test_fit_finds_the_model_that_was_measured() -> None:
    found = fit([one_after_another(), together()])
    assert found.outside_s == pytest.approx(OUTSIDE_S, rel=0.02)
    for name, value in asdict(STEP_TIME).items():
        assert getattr(found.step_time, name) == pytest.approx(value, rel=0.02), name
    assert found.prefill_error < 0.001 and found.decode_error < 0.001


def test_gaps_while_a_prompt_is_computed_are_left_out() -> None:
    requests = [request_at(0, 100, 30), request_at(0.03, 1000, 2, block=1)]
    records = cluster("1U").run(requests, rate=1, until_s=FOREVER)
    assert max(records[0].itl_s) > 0.1  # the second prompt's step
    found = quiet_stretches(records)
    assert 15 <= sum(one.gaps for one in found) < 30 and max(one.seconds for one in found) < 0.01
    assert {one.requests for one in found} == {1, 2}


def in_clumps(record: RequestRecord) -> RequestRecord:
    """As a client sees it whose connection delivers four tokens at once."""
    gaps, clumped, held = record.itl_s, list[float](), 0.0
    for number, gap in enumerate(gaps):
        held += gap
        last = number % 4 == 3 or number == len(gaps) - 1
        clumped.append(held - 3e-6 if last else 1e-6)
        held = 0.0 if last else held
    return msgspec.structs.replace(record, itl_s=clumped)


def test_tokens_that_come_in_clumps_are_no_shorter_steps() -> None:
    found = fit([one_after_another(), [in_clumps(record) for record in together()]])
    load = StepLoad(decodes=8, decode_context=8 * 300, samples=8)
    assert found.step_time.seconds(load) == pytest.approx(STEP_TIME.seconds(load), rel=0.1)


def test_what_the_hand_over_adds() -> None:
    """Four messages and a latency a request; a token's bytes over the link."""
    records = one_after_another("1P1D", link=LINK / 4)
    found = fit_handover(one_after_another(), records)
    assert found.token_s == pytest.approx(PAGE_BYTES / PAGE_SIZE / (LINK / 4), rel=0.02)
    assert found.request_s == pytest.approx(4 * CONTROL_S + LATENCY_S, rel=0.5)  # pages are whole
    with pytest.raises(ConfigError, match=r"^--fit-pair: 0 requests were alone"):
        fit_handover([], records)


def test_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--fit: 0 requests were alone .* --concurrency 1 "):
        fit([together()])
    with pytest.raises(ConfigError, match=r"^--fit: 0 gaps .* --concurrency 8 "):
        fit([[msgspec.structs.replace(record, itl_s=[]) for record in one_after_another()]])


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot be read"), ("{}", "no report"), ('{"targets": []}', "no target"), ("nonsense", "no report")],
)
def test_files_that_are_no_reports(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^--fit {path}: .*{said}"):
        read_records(str(path))
