"""New weights from a checkpoint, from tensors of a request, and from a trainer's process group.

Names and defaults are SGLang's (`srt/managers/io_struct.py`).
"""

import base64
import binascii
from typing import Any

from fastapi import Response

from engine.frontend.apis.admin.control import UPDATE_TIMEOUT_S, Order, add_orders
from engine.frontend.apis.shared.routes import RouteTags, admin_route
from engine.frontend.services import Services
from engine.messages import JoinTrainer, LeaveTrainer, NameWeights, NewTensors, UpdateWeights
from service.http.api import ApiRouter
from service.http.body import Body, optional, required
from service.http.errors import bad_field, read_body
from service.http.request import HttpRequest
from service.http.routes import json_response

API = ApiRouter(RouteTags.OPERATIONS)
MAX_NAME_CHARS = 256  # of versions, groups and hosts
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "uint8", "int32", "int64")
BACKENDS = ("gloo", "nccl")
LOAD_FORMATS = (None, "auto", "safetensors")
SELECTORS = (None, "all", "target")
PICKLE = b"\x80"  # first byte of protocols since 2
GROUP = "weight_update_group"
MOST_RANKS, LONGEST_SIDE = 1 << 16, 1 << 40
_REQUIRED: dict[str, Any] = {"body_required": True, "timeout_s": UPDATE_TIMEOUT_S}
TAKEN = "base64 of a safetensors file with whole tensors, as safetensors.torch.save makes it"


class _Update(Body):
    load_format: str | None = optional("auto or safetensors. Default auto.", "auto")
    abort_all_requests: bool | None = optional(
        "True: ends running requests first. Default false: the update waits for them.", False
    )
    weight_version: str | None = optional("Name of the weights, 1 to 256 characters, shown in answers.", "step-2")


class UpdateWeightsBody(_Update):
    model_path: str = required(
        "Directory of a checkpoint on the worker's disk, of the same architecture.", "/models/step-2"
    )


class UpdateTensorsBody(_Update):
    serialized_named_tensors: list[str] = required(
        "Base64 of a safetensors file with whole tensors by the names of the checkpoint, once or once for each rank.",
        ["CAAAAAAAAAB7fSAgICAgIA=="],
    )
    flush_cache: bool | None = optional("Not used: KV of other weights is never used.", True)


class UpdateDistributedBody(_Update):
    names: list[str] = required(
        "Names of the tensors, as in the checkpoint, in the order of their broadcasts.", ["model.norm.weight"]
    )
    dtypes: list[str] = required('Data type of each tensor, as "bfloat16" or "torch.bfloat16".', ["bfloat16"])
    shapes: list[list[int]] = required("Shape of each tensor.", [[576]])
    group_name: str = optional(f"Name of the process group. Default {GROUP}.", GROUP, default=GROUP)
    flush_cache: bool | None = optional("Not used: KV of other weights is never used.", True)


class NameWeightsBody(Body):
    new_version: str = required("Name of the weights, 1 to 256 characters, shown in answers.", "7")
    abort_all_requests: bool | None = optional(
        "True: ends running requests, whose tokens would be of both versions. Default true.", True
    )


class UpdateSessionBody(Body):
    selector: str | None = optional("Models that an update changes: all or target. Default all.", "all")


class JoinGroupBody(Body):
    master_address: str = required("Host of the trainer, which is rank 0.", "10.0.0.1")
    master_port: int = required("Port of the trainer's store, 1 to 65535.", 29500)
    rank_offset: int = required("Number of this worker's first rank in the group, 1 to world_size - 1.", 1)
    world_size: int = required("Members of the group: the trainer and all ranks of all workers.", 2)
    group_name: str = optional(f"Name of the process group. Default {GROUP}.", GROUP, default=GROUP)
    backend: str = optional("gloo or nccl. Default nccl.", "nccl", default="nccl")


class LeaveGroupBody(Body):
    group_name: str = optional(f"Name of the process group. Default {GROUP}.", GROUP, default=GROUP)


def from_disk(s: Services, call_id: str, body: UpdateWeightsBody) -> UpdateWeights:
    """200 once later tokens use the new weights; 400, unchanged, if they do not fit."""
    if not body.model_path:
        raise bad_field("model_path", "must name a checkpoint directory on the worker's disk")
    _check_format(body.load_format)
    return _update(call_id, body, model_path=body.model_path)


def from_tensors(s: Services, call_id: str, body: UpdateTensorsBody) -> UpdateWeights:
    """Like `from_disk`. SGLang's clients repeat the tensors for each rank."""
    field, given = "serialized_named_tensors", body.serialized_named_tensors
    _check_format(body.load_format)
    if not given:
        raise bad_field(field, f"must have one entry, {TAKEN}")
    if any(other != given[0] for other in given[1:]):
        raise bad_field(field, "its entries differ; send whole tensors once, and each rank takes its part")
    try:
        data = base64.b64decode(given[0], validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_field(field, f"must be {TAKEN}: {error}") from None
    if data.startswith(PICKLE):
        raise bad_field(
            field,
            f"is a pickle, which could run code here, and holds handles of memory instead of values; send {TAKEN}, or "
            "use /update_weights_from_distributed",
            code="unsupported_format",
        )
    return _update(call_id, body, tensors=NewTensors(data=data))


def from_trainer(s: Services, call_id: str, body: UpdateDistributedBody) -> UpdateWeights:
    """Like `from_disk`, after the trainer has broadcast all tensors."""
    _check_format(body.load_format)
    _check_name("group_name", body.group_name)
    dtypes = [dtype.removeprefix("torch.") for dtype in body.dtypes]
    if not body.names:
        raise bad_field("names", "must name at least one tensor")
    for field, values in (("dtypes", dtypes), ("shapes", body.shapes)):
        if len(values) != len(body.names):
            raise bad_field(field, f"must have an entry for each of {len(body.names)} names, has {len(values)}")
    if len(set(body.names)) < len(body.names):
        raise bad_field("names", "a tensor is named twice")
    if unknown := next((dtype for dtype in dtypes if dtype not in DTYPES), None):
        raise bad_field("dtypes", f"must be of {', '.join(DTYPES)}, got {unknown!r}")
    if any(not 0 <= size < LONGEST_SIDE for shape in body.shapes for size in shape):
        raise bad_field("shapes", f"must have sizes of 0 to {LONGEST_SIDE}")
    tensors = NewTensors(group=body.group_name, names=body.names, dtypes=dtypes, shapes=body.shapes)
    return _update(call_id, body, tensors=tensors)


def renamed(s: Services, call_id: str, body: NameWeightsBody) -> NameWeights:
    """200 once later answers show the name."""
    _check_name("new_version", body.new_version)
    return NameWeights(call_id, body.new_version, abort_all=body.abort_all_requests is not False)


@API.on(admin_route, "/begin_weight_update", UpdateSessionBody, body_required=False)
async def begin_weight_update(request: HttpRequest) -> Response:
    """Begin updates, as SGLang's trainers do.

    Nothing is prepared here: an update reads and checks whole tensors, and is complete by itself.
    """
    body = read_body(await request.read() or b"{}", UpdateSessionBody)
    if body.selector not in SELECTORS:
        raise bad_field("selector", f"must be all or target: tensors are the served model's; got {body.selector!r}")
    return json_response({"success": True, "message": "Updates may come; each is complete by itself."})


@API.on(admin_route, "/end_weight_update")
async def end_weight_update(request: HttpRequest) -> Response:
    """End updates, as SGLang's trainers do.

    Each is in use since its own answer.
    """
    return json_response({"success": True, "message": "All updates are in use."})


def _join(s: Services, call_id: str, body: JoinGroupBody) -> JoinTrainer:
    """200 once all members of the group are there."""
    _check_name("group_name", body.group_name)
    _check_name("master_address", body.master_address)
    if not 0 < body.master_port < 1 << 16:
        raise bad_field("master_port", f"must be 1 to 65535, got {body.master_port}")
    if not 1 < body.world_size <= MOST_RANKS:
        raise bad_field("world_size", f"must count the trainer and all ranks of all workers, got {body.world_size}")
    if not 0 < body.rank_offset < body.world_size:
        raise bad_field(
            "rank_offset", f"must be 1 to {body.world_size - 1}, because the trainer has rank 0; got {body.rank_offset}"
        )
    if body.backend not in BACKENDS:
        raise bad_field("backend", f"must be one of {', '.join(BACKENDS)}, got {body.backend!r}")
    return JoinTrainer(
        call_id,
        body.group_name,
        body.master_address,
        body.master_port,
        rank_offset=body.rank_offset,
        world_size=body.world_size,
        backend=body.backend,
    )


def _leave(s: Services, call_id: str, body: LeaveGroupBody) -> LeaveTrainer:
    _check_name("group_name", body.group_name)
    return LeaveTrainer(call_id, body.group_name)


def _update(call_id: str, body: _Update, *, model_path: str = "", tensors: NewTensors | None = None) -> UpdateWeights:
    if body.weight_version is not None:
        _check_name("weight_version", body.weight_version)
    aborts = bool(body.abort_all_requests)
    return UpdateWeights(call_id, model_path, weight_version=body.weight_version, abort_all=aborts, tensors=tensors)


async def update_by_tensors(
    s: Services, data: bytes, *, weight_version: str | None = None, abort_all: bool = False
) -> None:
    """Update by `data`, a safetensors file. Raises ApiError, with the old weights in use."""
    body = _Update(weight_version=weight_version, abort_all_requests=abort_all)
    message = _update(s.leaders.mint_call_id(), body, tensors=NewTensors(data=data))
    await s.leaders.control(message, timeout_s=UPDATE_TIMEOUT_S)


def _check_format(load_format: str | None) -> None:
    if load_format not in LOAD_FORMATS:
        raise bad_field("load_format", f"must be auto or safetensors, got {load_format!r}")


def _check_name(field: str, name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise bad_field(field, f"must have 1 to {MAX_NAME_CHARS} characters")


ORDERS = {
    **{
        path: Order(
            about=f"{about}\n\n200 once later tokens use the new weights; 400, unchanged, if they do not fit.",
            message=message,
            body=body,
            shown=lambda s, reply: {"num_paused_requests": 0, **reply.values},
            **_REQUIRED,
        )
        for path, message, body, about in (
            ("/update_weights_from_disk", from_disk, UpdateWeightsBody, "Take the weights of another checkpoint."),
            ("/update_weights_from_tensor", from_tensors, UpdateTensorsBody, "Take the tensors of the body."),
            (
                "/update_weights_from_distributed",
                from_trainer,
                UpdateDistributedBody,
                "Receive tensors from a trainer's process group.",
            ),
        )
    },
    "/update_weight_version": Order(
        about="Give the weights another name.\n\n200 once later answers show it.",
        message=renamed,
        body=NameWeightsBody,
        body_required=True,
        shown=lambda s, reply: {"new_version": reply.values["weight_version"]},
    ),
    "/init_weights_update_group": Order(
        about="Join a trainer's process group.", message=_join, body=JoinGroupBody, **_REQUIRED
    ),
    "/destroy_weights_update_group": Order(
        about="Leave a trainer's process group.", message=_leave, body=LeaveGroupBody, timeout_s=UPDATE_TIMEOUT_S
    ),
}
add_orders(API, ORDERS)
