"""The fit finds the cost model that made the records: the planner's own clusters are measured as a server would be."""

from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from deploy.bench.stats import Record
from deploy.plan.fit import fit, quiet_gaps, read_records
from engine.config import ConfigError
from tests.plan.planned import OUTSIDE_S, STEP_TIME, asked, cluster

FOREVER = float("inf")


def one_after_another() -> list[Record]:
    requests = [asked(i, 60 + 61 * (i * 7 % 20), 12, block=i) for i in range(20)]
    return cluster("1U").run(requests, rate=1, until_s=FOREVER)


def together() -> list[Record]:
    requests = [asked(i // 8, 40 + 50 * (i % 8), 60, block=i) for i in range(32)]
    return cluster("1U").run(requests, rate=2, until_s=FOREVER)


def test_fit_finds_the_model_that_was_measured() -> None:
    found = fit([one_after_another(), together()])
    assert found.outside_s == pytest.approx(OUTSIDE_S, rel=0.02)
    for name, value in asdict(STEP_TIME).items():
        assert getattr(found.step_time, name) == pytest.approx(value, rel=0.02), name
    assert found.prefill_error < 0.001 and found.decode_error < 0.001


def test_gaps_while_a_prompt_is_computed_are_left_out() -> None:
    requests = [asked(0, 100, 30), asked(0.03, 1000, 2, block=1)]
    records = cluster("1U").run(requests, rate=1, until_s=FOREVER)
    assert max(records[0].itl_s) > 0.1  # the second prompt's step
    gaps = quiet_gaps(records)
    assert 15 <= len(gaps) < 30 and max(gap.seconds for gap in gaps) < 0.01
    assert {gap.requests for gap in gaps} == {1, 2}


def test_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--fit: 0 requests were alone .* --concurrency 1 "):
        fit([together()])
    with pytest.raises(ConfigError, match=r"^--fit: 0 gaps .* --concurrency 8 "):
        fit([[record_without_gaps(r) for r in one_after_another()]])


def record_without_gaps(record: Record) -> Record:
    return msgspec.structs.replace(record, itl_s=[])


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
