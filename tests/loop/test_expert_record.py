"""Records of experts: what lies between start and stop is written; without a start, or without experts, a call is refused."""

import json
from pathlib import Path

from engine.loop.expert_record import ExpertRecord
from engine.messages import ControlReply, RecordExperts


def test_a_record_holds_what_came_between_start_and_stop(tmp_path: Path) -> None:
    loads, replies = [[0, 0], [5, 1]], list[ControlReply]()
    record = ExpertRecord(lambda: [list(row) for row in loads], name="w", reply=replies.append)

    def tell(action: str, output_dir: str = "") -> ControlReply:
        record.on_message(RecordExperts("c", action, output_dir))
        return replies[-1]

    refused = tell("dump")
    assert (refused.ok, refused.status) == (False, 400) and "start it first" in refused.message
    assert tell("start").ok
    loads[1] = [7, 4]
    file = str(tell("dump", str(tmp_path / "new")).values["file"])
    assert json.loads(Path(file).read_text()) == {"logical_count": [[0, 0], [2, 3]]}
    assert tell("stop").ok
    loads[1] = [100, 100]
    file = str(tell("dump", str(tmp_path)).values["file"])
    assert json.loads(Path(file).read_text()) == {"logical_count": [[0, 0], [2, 3]]}
    (tmp_path / "file").touch()
    assert tell("dump", str(tmp_path / "file")).message.startswith(f"output_dir: {tmp_path / 'file'}: no file")


def test_a_model_without_experts_has_nothing_to_record() -> None:
    replies = list[ControlReply]()
    ExpertRecord(list, name="w", reply=replies.append).on_message(RecordExperts("c", "start"))
    assert not replies[0].ok and replies[0].message == "the model has no experts"
