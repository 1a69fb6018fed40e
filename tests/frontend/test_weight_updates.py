"""Bodies of new weights: what is refused at the door names its field and the remedy, and reaches no scheduler."""

import base64
import re
from typing import Any

import pytest

from engine.frontend.apis.admin.weights import (
    NameWeightsBody,
    UpdateDistributedBody,
    UpdateTensorsBody,
    from_tensors,
    from_trainer,
    renamed,
)
from engine.messages import NameWeights, NewTensors
from tests.frontend.conftest import Worker

TENSOR, TRAINER = "/update_weights_from_tensor", "/update_weights_from_distributed"
NAME, BEGIN = "/update_weight_version", "/begin_weight_update"
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
FILE = base64.b64encode(b"\x08\0\0\0\0\0\0\0{}      ").decode()
PICKLE = base64.b64encode(b"\x80\x04N.").decode()
ONE: dict[str, Any] = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]}
GROUP: dict[str, Any] = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (TENSOR, {"serialized_named_tensors": []}, "serialized_named_tensors", "must have one entry, base64"),
    (TENSOR, {"serialized_named_tensors": [FILE, "eA=="]}, "serialized_named_tensors", "send whole tensors once"),
    (TENSOR, {"serialized_named_tensors": ["no base64!"]}, "serialized_named_tensors", "must be base64 of a safetens"),
    (TENSOR, {"serialized_named_tensors": [PICKLE]}, "serialized_named_tensors", "is a pickle, which could run code"),
    (TENSOR, {"serialized_named_tensors": [FILE], "load_format": "flattened_bucket"}, "load_format", "auto or safet"),
    (TENSOR, {"serialized_named_tensors": [FILE], "weight_version": ""}, "weight_version", "must have 1 to 256"),
    (TENSOR, {}, "serialized_named_tensors", "missing"),
    (TRAINER, {**ONE, "names": []}, "names", "at least one"),
    (TRAINER, {**ONE, "names": ["a", "b"]}, "dtypes", "an entry for each of 2 names, has 1"),
    (TRAINER, {**ONE, "shapes": []}, "shapes", "an entry for each of 1 names, has 0"),
    (TRAINER, {"names": ["a"] * 2, "dtypes": ["int8"] * 2, "shapes": [[]] * 2}, "names", "named twice"),
    (TRAINER, {**ONE, "dtypes": ["complex64"]}, "dtypes", "must be of bfloat16, .* got 'complex64'"),
    (TRAINER, {**ONE, "shapes": [[-1]]}, "shapes", "sizes of 0"),
    (TRAINER, {**ONE, "shapes": [[1 << 70]]}, "shapes", "sizes of 0"),
    (TRAINER, {**ONE, "group_name": ""}, "group_name", "1 to 256"),
    (JOIN, {**GROUP, "master_port": 0}, "master_port", "1 to 65535"),
    (JOIN, {**GROUP, "master_address": ""}, "master_address", "1 to 256"),
    (JOIN, {**GROUP, "rank_offset": 0}, "rank_offset", "must be 1 to 2, because the trainer has rank 0"),
    (JOIN, {**GROUP, "rank_offset": 3}, "rank_offset", "must be 1 to 2"),
    (JOIN, {**GROUP, "world_size": 1}, "world_size", "must count the trainer and all ranks"),
    (JOIN, {**GROUP, "world_size": 1 << 40}, "world_size", "must count the trainer"),
    (JOIN, {**GROUP, "backend": "mpi"}, "backend", "must be one of gloo, nccl"),
    (LEAVE, {"group_name": "x" * 300}, "group_name", "1 to 256"),
    (NAME, {"new_version": ""}, "new_version", "1 to 256"),
    (NAME, {"abort_all_requests": False}, "new_version", "missing"),
    (BEGIN, {"selector": "draft"}, "selector", "must be all or target: .* got 'draft'"),
]


@pytest.mark.parametrize(("path", "body", "field", "text"), BAD)
def test_a_bad_body_is_refused_with_its_field(
    worker: Worker, path: str, body: dict[str, Any], field: str, text: str
) -> None:
    error = worker.error(path, body)
    assert error["param"] == field and re.search(text, error["message"]), error


def test_tensors_go_to_the_scheduler_as_they_are() -> None:
    """SGLang's clients repeat them for each rank."""
    body = UpdateTensorsBody(serialized_named_tensors=[FILE, FILE], weight_version="7", abort_all_requests=True)
    update = from_tensors(None, "c", body)  # type: ignore[arg-type]
    assert (update.model_path, update.weight_version, update.abort_all) == ("", "7", True)
    assert update.tensors == NewTensors(data=base64.b64decode(FILE))


def test_a_new_name_of_weights_ends_requests_unless_it_says_not_to() -> None:
    """As SGLang's default is."""
    for given, ends in ((None, True), (True, True), (False, False)):
        body = NameWeightsBody(new_version="7", abort_all_requests=given)
        assert renamed(None, "c", body) == NameWeights("c", "7", abort_all=ends)  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [{}, {"selector": "all"}, {"selector": "target"}])
def test_updates_begin_and_end(worker: Worker, body: dict[str, str]) -> None:
    """SGLang's trainers call them around every update; here an update is complete by itself."""
    for path in (BEGIN, "/end_weight_update"):
        assert worker.post(path, body).json()["success"] is True


def test_a_broadcast_is_described_as_torch_or_sglang_write_it() -> None:
    body = UpdateDistributedBody(names=["a", "b"], dtypes=["torch.bfloat16", "float32"], shapes=[[2], []])
    update = from_trainer(None, "c", body)  # type: ignore[arg-type]
    wanted = NewTensors(group="weight_update_group", names=["a", "b"], dtypes=["bfloat16", "float32"], shapes=[[2], []])
    assert update.tensors == wanted
