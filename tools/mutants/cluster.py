"""Bugs that the simulated cluster must find within its fixed seeds and scenarios: in transfers, roles, servers and the router."""

from dataclasses import replace

import msgspec
import numpy as np

from bootstrap_server.client import Registrar
from disagg.decode_role import DecodeRole
from disagg.handover import Purpose
from disagg.metadata import verified, verify
from disagg.moving import Moves
from disagg.outgoing import Outgoing
from disagg.page_sender import PageSender
from disagg.recompute import request_for
from engine.core.departures import Departures
from engine.core.held import HeldRequests
from engine.core.memory import Memory
from engine.core.page_allocator import PageAllocator
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.stages import Stages
from engine.core.state_slots import StateSlots
from engine.core.window_pages import WindowPages
from engine.frontend import draining
from engine.frontend.apis.shared.kept import head_of
from engine.frontend.apis.shared.resumable import Frames, WholeFrames
from engine.frontend.client.engine_client import EngineClient
from engine.frontend.errors import from_finish
from engine.loop.control import EngineControl
from engine.loop.deadlines import Deadlines
from engine.loop.pipeline import StepStream
from router.attempts.pair_attempt import PairAttempt, RoomMinter
from router.attempts.request import RequestContext
from router.attempts.upstream_call import UpstreamCall
from router.pool.worker import Loads
from router.requests.failover import ResumableAnswer
from router.requests.live import LiveRequests
from service.http.reconnect import StreamLog, StreamLogs
from service.http.resume import FrameRecord
from tools.mutants.core import CORE
from tools.mutants.planting import Bugs
from transfer_backends.contract import KVArgs, OpState
from transfer_backends.decode.core import DecodeCore
from transfer_backends.decode.lookup import PrefillFinder
from transfer_backends.decode.proof import Proofs
from transfer_backends.decode.room import DecodeRoom
from transfer_backends.decode.rooms import DecodeRooms
from transfer_backends.kvpoll import KVPoll
from transfer_backends.liveness import of_worker
from transfer_backends.prefill.admission import PeerAdmission
from transfer_backends.prefill.completions import Completions
from transfer_backends.prefill.offers import Offers
from transfer_backends.prefill.paths import FencePeer, Path, Paths
from transfer_backends.prefill.posts import num_open, plan_ops
from transfer_backends.prefill.room import PrefillRoom
from transfer_backends.prefill.rooms import PrefillRooms
from transfer_backends.ranks.engines import RankEngines
from transfer_backends.shards import Shard, plan_shards

CLUSTER = Bugs()


# ---- when pages are safe again


@CLUSTER.bug("skip the quarantine", DecodeRoom.drained, "Decode reuses pages that prefill may still write.")
def _(original, room):
    return room.final


CLUSTER.skip(
    "drop the abort acknowledgement",
    PrefillRooms.report_drained,
    "Prefill never says that the writes of an aborted room have ended.",
)


@CLUSTER.bug(
    "acknowledge an abort while writes are in flight",
    Offers.on_abort,
    "Prefill answers an abort before its writes have ended.",
)
def _(original, offers, peer, message, now_s):
    original(offers, peer, message, now_s)
    room = offers._rooms.get((message.room, message.attempt))
    if room is not None and room.owes_drained:
        room.owes_drained = False
        offers._paths.drained(peer, room.key, room.write_try)


@CLUSTER.bug(
    "acknowledge after a failed write without a fence",
    PrefillRoom.quiet,
    "A failed write counts as ended although its bytes may still land.",
)
def _(original, room):
    return room.num_ops == 0


@CLUSTER.bug(
    "drain a room whose bytes may still land",
    Paths.drained,
    "Decode reuses pages of a failed write after a fence that failed, too.",
)
def _(original, paths, peer, key, write_try):
    landing, peer.path.landing = peer.path.landing, {}
    original(paths, peer, key, write_try)
    peer.path.landing = landing


@CLUSTER.bug(
    "give source pages back while they are read",
    PrefillRoom.released,
    "Prefill reuses pages that a write still reads.",
)
def _(original, room):
    return room.final


@CLUSTER.bug(
    "take a lost connection for the end of all writes",
    DecodeCore._lose,
    "A connection that is lost ends the exposure of all its rooms.",
)
def _(original, core, peer, why, now_s):
    for room in core.rooms.of(peer):
        core.rooms.expose(room, False)
    original(core, peer, why, now_s)


@CLUSTER.bug(
    "do not wait for a dead writer's last bytes",
    Proofs.on_proof,
    "Pages are free at the proof of death, before the writer's last bytes have landed.",
)
def _(original, proofs, incarnation, proof, now_s):
    original(proofs, incarnation, proof, now_s)
    peer = proofs._peers.get(incarnation)
    if peer is not None and peer.settled_at_s is not None:
        peer.settled_at_s = 0.0


@CLUSTER.bug(
    "accept a registration for an earlier process",
    PeerAdmission.register,
    "Prefill accepts a registration that was meant for the process before it.",
)
def _(original, registration, link, message, now_s):
    return original(registration, link, msgspec.structs.replace(message, dst=""), now_s)


@CLUSTER.bug("never fence", Paths.on_op_final, "No fence follows a failed write.")
def _(original, paths, peer, pieces, *, ok, now_s):
    original(paths, peer, pieces, ok=ok, now_s=now_s)
    if paths.commands and isinstance(paths.commands[-1], FencePeer):
        paths.commands.pop()


# ---- what is written, and when


@CLUSTER.bug(
    "report Success before the last write is done",
    Completions._on_written,
    "A room succeeds while one of its writes is in flight.",
)
def _(original, completions, room, post, now_s):
    num_ops, room.num_ops = room.num_ops, 0
    original(completions, room, post, now_s)
    room.num_ops = num_ops


@CLUSTER.bug("let a layer leave before it is written", num_open, "A group of layers is posted one layer too early.")
def _(original, chunk, progress, args):
    return original(chunk, progress._replace(layers=progress.layers + 1), args)


@CLUSTER.bug(
    "begin a second try behind the layers that left in the first",
    PrefillRoom.clear,
    "A second try leaves out the layers that the first one posted.",
)
def _(original, room):
    left = room.left_groups
    original(room)
    room.left_groups = left


@CLUSTER.bug(
    "send the metadata row before the last write has ended",
    PrefillRoom.written,
    "Success, and the row with it, overtakes pages on their way.",
)
def _(original, room):
    return room.all_queued and not room.posts and not room.chunks and not room.awaits_fence


@CLUSTER.bug("send what decode has cached, too", plan_ops, "Pages that decode did not ask for shift all the others.")
def _(original, chunk, offer, *args, **kwargs):
    cached = chunk.src[: max(0, offer.skip_pages - chunk.start)]
    return original(replace(chunk, src=np.concatenate([cached, chunk.src])), offer, *args, **kwargs)


@CLUSTER.bug(
    "count the writes of an older try",
    Completions._on_written,
    "A completion of an earlier try counts for the one that runs.",
)
def _(original, completions, room, post, now_s):
    original(completions, room, replace(post, write_try=max(post.write_try, room.write_try)), now_s)


# ---- what crosses beside pages


@CLUSTER.bug("send no tail", plan_ops, "States and pages of windows do not leave with the last chunk.")
def _(original, chunk, *args, **kwargs):
    return original(replace(chunk, tail=()), *args, **kwargs)


@CLUSTER.bug("send the tail once", PrefillRoom.start_over, "A second try leaves out states and pages of windows.")
def _(original, room):
    without = [replace(chunk, tail=()) for chunk in room.all_chunks]
    room.all_chunks.clear()
    room.all_chunks.extend(without)
    original(room)


@CLUSTER.bug(
    "clear a state that has landed", StateSlots.adopt, "The slot of a handed-over request is zeroed as a new one."
)
def _(original, states, request):
    states.begin(request, source=0)


@CLUSTER.bug("free window pages in quarantine at once", WindowPages.quarantine, "A peer writes into another's window.")
def _(original, windows, request):
    windows.free(request)
    return []


CLUSTER.skip(
    "others find pages of a window in which nothing landed",
    Memory.retire,
    "Decode shares a page that it reserved behind the last window.",
    called_by=HeldRequests._run,
)


# ---- ranks


@CLUSTER.bug(
    "report Success when the leader's part is written",
    RankEngines.poll,
    "A write of another rank counts as landed at once.",
)
def _(original, ranks, op):
    own = any(engine is ranks._engines[0] for engine, _ in op.parts)
    return original(ranks, op) if own or not op.parts else OpState.DONE


@CLUSTER.bug("fence one pair of ranks", RankEngines.fence, "A fence of the leaders counts for all pairs of ranks.")
def _(original, ranks, peer):
    pair = next(iter(peer.of_pairs))
    return original(ranks, replace(peer, of_pairs={pair: peer.of_pairs[pair]}))


@CLUSTER.bug(
    "poll the leader's engine alone", RankEngines.progress, "Decode's other ranks do not poll when prefill asks for it."
)
def _(original, ranks, *, eager=False):
    ranks._engines[0].progress(eager=eager)


@CLUSTER.bug(
    "take the leader's death for the death of all its ranks",
    of_worker,
    "Pages are free while a follower of a dead leader writes.",
)
def _(original, ranks):
    return original(ranks[:1])


@CLUSTER.bug(
    "take a successor for the death of all ranks",
    Proofs.on_successor,
    "A new process at the leader's address proves that its followers are dead.",
)
def _(original, proofs, peer, now_s):
    peer.marks = peer.marks[:1]
    original(proofs, peer, now_s)


@CLUSTER.bug(
    "write a replica from two ranks", plan_shards, "Each rank that holds a unit writes it.", called_by=Path.to.__func__
)
def _(original, mine, theirs, *, turn=0):
    both = [original(mine, theirs, turn=turn) for turn in range(len(mine.ranks))]
    return tuple(dict.fromkeys(shard for shards in both for shard in shards))


@CLUSTER.bug(
    "let the leader's layer prove that of all ranks",
    KVArgs.written,
    "A follower's layer leaves as soon as the leader has written its own.",
)
def _(original, args, layers):
    return layers


@CLUSTER.bug("read the first rank's unit for all", Shard._units, "Every rank exchanges its first unit.")
def _(original, shard, pages, held):
    return original(shard, pages, replace(held, first=0))


# ---- what the two sides tell one another

CLUSTER.skip(
    "ignore page indices that come before the request",
    PrefillRooms.accept,
    "Page indices that overtake the request are lost.",
    called_by=PrefillRooms.open,
)
CLUSTER.skip(
    "look a room up once and never again",
    PrefillFinder.seek,
    "A failed look-up is not repeated.",
    called_by=DecodeCore._check_deadline,
)
CLUSTER.skip(
    "do not report a failed transfer to decode",
    PrefillRooms._report,
    "Decode learns of a failed transfer by its own timeout alone.",
    called_by=PrefillRooms.fail,
)
CLUSTER.skip(
    "do not send an abort to prefill",
    DecodeRooms.send_abort,
    "Prefill goes on with a room that decode has given up.",
    called_by=DecodeRooms.report_abort,
)


@CLUSTER.bug("end without leaving the bootstrap server", Registrar.close, "A worker that ends stays registered.")
def _(original, registrar):
    registrar.registered.clear()
    original(registrar)


# ---- the roles


@CLUSTER.bug(
    "start to decode while the transfer runs",
    DecodeRole.poll,
    "Decode starts when the first status arrives, before all of the KV has landed.",
)
def _(original, role, now_s):
    outputs = original(role, now_s)
    for transfer in list(role.incoming.transfers.values()):
        if transfer.receiver.poll() is KVPoll.Transferring:
            role.incoming._land(transfer)
    started, role._outputs = role._outputs, []
    return outputs + started


@CLUSTER.bug(
    "forget a metadata row",
    Outgoing._forget_when_released,
    "The metadata rows of some rooms are not freed.",
)
def _(original, role, handover):
    if handover.sender.released() and handover.room % 4 == 0:
        handover.metadata_row = None
    original(role, handover)


@CLUSTER.bug(
    "hand pages over before they are computed",
    PageSender.send_whole_pages,
    "Pages of a step that is in flight are sent.",
)
def _(original, pages, handover):
    request, computed = handover.request, handover.request.computed_len
    request.computed_len = max(computed, min(request.launched_len, len(request.input_ids) - 1))
    original(pages, handover)
    request.computed_len = computed


CLUSTER.skip("do not verify the checksum", verify, "Decode computes with a damaged page.", called_by=verified)

# ---- namespaces of the prefix cache


@CLUSTER.bug(
    "share prefixes across namespaces",
    Request.branch,
    "A request finds the prefixes of every namespace.",
)
def _(original, request):
    return original(request)._replace(namespace=())


@CLUSTER.bug(
    "compute a retracted request again outside its namespace",
    request_for,
    "Prefill computes again with the KV of the common namespace.",
)
def _(original, wanted, now_s):
    request = original(wanted, now_s)
    request.namespace = ()
    return request


# ---- the core


@CLUSTER.bug(
    "release pages twice",
    PageAllocator.free,
    "A request that ends gives its pages back twice.",
    called_by=Memory.give_back,
)
def _(original, allocator, pages):
    original(allocator, pages)
    original(allocator, pages)


@CLUSTER.bug(
    "free memory while a step is in flight",
    Stages.take_settled,
    "Ended requests give their memory back although a launched step still writes it.",
)
def _(original, stages):
    settled, stages.draining = stages.draining, []
    for request in settled:
        request.inflight = 0
    return settled


_shared_early = CORE["a page is shared before its last token is computed"]
CLUSTER["share a page that is not whole"] = replace(_shared_early, name="share a page that is not whole")

CLUSTER.skip(
    "find prefixes of the weights before",
    Scheduler.forget_prefixes,
    "An update of the weights leaves the radix tree as it is.",
    called_by=EngineControl._take,
)


@CLUSTER.bug(
    "load other weights while KV is in use",
    Scheduler.holds_no_kv,
    "An update of the weights does not wait for running requests.",
    called_by=EngineControl._finish_update,
)
def _(original, scheduler):
    return True


@CLUSTER.bug("let a request outlive its deadline", Deadlines.due, "No deadline is ever due.")
def _(original, deadlines, now_s):
    return iter(())


# ---- the worker's server

CLUSTER.skip(
    "accept requests while draining",
    EngineClient.close,
    "A draining worker takes new requests.",
    called_by=draining.drain,
)
CLUSTER.skip(
    "do not hand back what has not ended when a worker ends",
    EngineClient.fail_all,
    "A worker ends without an answer to what still runs.",
    called_by=draining._hand_back,
)
CLUSTER.skip(
    "accept a request that cannot meet its deadline",
    EngineClient._check_timeout,
    "A request whose deadline cannot be met is queued all the same.",
)


@CLUSTER.bug("refuse for load without Retry-After", from_finish, "A 503 for load carries no Retry-After header.")
def _(original, finish):
    error = original(finish)
    assert error.retry_after_s is None or finish.status == 503
    error.retry_after_s = None
    return error


# ---- the router


@CLUSTER.bug("reuse a room", RoomMinter._mint_one, "Two live requests share a room.")
def _(original, minter, *at):
    room = 0
    while room == 0:
        room = minter._draw(2)
    minter._live.add(room)
    return room


CLUSTER.skip(
    "keep the lease of an ended attempt",
    Loads.release,
    "The load of an ended request stays charged to its worker.",
    called_by=PairAttempt.end,
)
CLUSTER.skip(
    "do not hand back what has not ended when the router ends",
    RequestContext.hand_back,
    "A router ends without an answer to what still runs.",
    called_by=LiveRequests.drain,
)


@CLUSTER.bug(
    "give a retry the whole deadline again",
    RequestContext.headers_at,
    "A retry starts with the timeout of the first try.",
)
def _(original, request, now_s):
    return request.headers


# ---- answers that go on at another worker


@CLUSTER.bug(
    "forget the newest tokens of a lost worker",
    FrameRecord.resume,
    "The next worker generates again what the client has.",
)
def _(original, record, *, by_kv=False):
    newest = record._ids[-1:]
    del record._ids[-1:]
    resume = original(record, by_kv=by_kv)
    record._ids += newest
    return resume


# ---- requests that move with their KV


@CLUSTER.bug(
    "let a request go while a step of it is in flight",
    Stages.take_departed,
    "A request leaves before its last step is collected: the token is lost.",
)
def _(original, stages):
    departed, stages.leaving = stages.leaving, []
    return departed


@CLUSTER.bug(
    "take the KV of the last token for computed",
    HeldRequests.go_on_decoding,
    "The next worker does not compute the KV of the last token, which was sampled and not computed.",
)
def _(original, held, request, *, cached_tokens):
    original(held, request, cached_tokens=cached_tokens)
    request.computed_len = request.launched_len = request.num_tokens


@CLUSTER.bug(
    "give pages back when the stream has ended",
    Moves._open,
    "The pages of a request that has left are free before the other worker has them.",
)
def _(original, moves, request, room):
    output = original(moves, request, room)
    if request in moves._scheduler.held:
        moves._scheduler.held.release(request)
    return output


CLUSTER.skip(
    "take no abort of a request that is about to leave",
    Moves.abort,
    "A request whose last step failed leaves with KV that was never written.",
)


@CLUSTER.bug(
    "count a request that leaves as retracted",
    Departures.move,
    "A request that leaves gives its memory back and waits here, too.",
)
def _(original, departures, request):
    request.moves = True
    departures.retract(request)


@CLUSTER.bug(
    "keep the row of a move",
    Outgoing._forget_when_released,
    "The metadata row of a request that moved is not freed.",
)
def _(original, outgoing, handover):
    if not handover.for_prompt and handover.purpose is Purpose.MOVE and handover.sender.released():
        handover.metadata_row = None
    original(outgoing, handover)


@CLUSTER.bug(
    "place the rest of a move one token behind",
    FrameRecord.resume,
    "Of what has moved the newest token is forgotten: the client gets it twice, or the pages do not fit.",
)
def _(original, record, *, by_kv=False):
    newest = record._ids[-1:] if by_kv else []
    if newest:
        del record._ids[-1:]
    resume = original(record, by_kv=by_kv)
    record._ids += newest
    return resume


@CLUSTER.bug(
    "keep the rooms of moves",
    RoomMinter.release,
    "The rooms in which KV of moves waited are never free again.",
    called_by=ResumableAnswer.close,
)
def _(original, rooms, released):
    """None is."""


@CLUSTER.bug(
    "drain without waiting for moves",
    DecodeRole.queues,
    "A worker ends while another one gets its KV.",
)
def _(original, role):
    return {**original(role), "moving": 0}


# ---- answers that go on at another worker, what the client has of them


@CLUSTER.bug(
    "keep tokens that no event has shown", FrameRecord.take, "The newest tokens are kept, and their event is lost."
)
def _(original, record, events):
    kept = original(record, events)
    has_ended = bool(record._ended)
    return kept if has_ended or len(record._ids) % 7 else b""


@CLUSTER.bug(
    "show an answer from its beginning",
    Frames._frames_of,
    "Frames name no tokens, so that the next worker begins anew.",
)
def _(original, frames, index, tokens):
    return b""


@CLUSTER.bug(
    "say half of a whole answer",
    WholeFrames.news,
    "Tokens that came since the last frames are counted as said, and are not.",
)
def _(original, frames, answers):
    original(frames, answers)
    return original(frames, answers)


@CLUSTER.bug(
    "generate samples that have ended again",
    FrameRecord.resume,
    "The next worker does not know which samples have ended.",
)
def _(original, record, *, by_kv=False):
    ended, record._ended = record._ended, {}
    resume = original(record, by_kv=by_kv)
    record._ended = ended
    return resume


@CLUSTER.bug(
    "let a pair get the KV that waits for a move",
    FrameRecord.resume,
    "A pair that computes the rest names the worker where KV waits in another room.",
)
def _(original, record, *, by_kv=False):
    return original(record, by_kv=True)


@CLUSTER.bug(
    "leave answers at silent workers",
    UpstreamCall.movable,
    "Clients of a frozen worker wait until it thaws.",
)
def _(original, call):
    return call.goes_on is None and original(call)


# ---- clients that come again


@CLUSTER.bug(
    "go on before the last event that the client has",
    StreamLog.rest_after,
    "A client that comes again gets the tokens of its last event twice.",
)
def _(original, log, unit, event):
    return original(log, max(1, unit - 1), event)


@CLUSTER.bug(
    "begin the rest of a unit with what the client has of it",
    StreamLog.rest_after,
    "Of several events that belong together the client gets its last one twice.",
)
def _(original, log, unit, event):
    return original(log, unit, None if event is None else event - 1)


@CLUSTER.bug(
    "keep what this worker has written alone",
    head_of,
    "What another worker had written before is generated again for a client that comes again.",
)
def _(original, begun, resume):
    return original(begun, None)


@CLUSTER.bug(
    "forget a stream when its connection breaks", StreamLogs.ended, "A stream is kept while it runs, and no longer."
)
def _(original, logs, stream, now_s):
    original(logs, stream, now_s)
    if stream.tag in logs._due_s:
        logs._drop(stream.tag)


CLUSTER.skip("keep streams for ever", StreamLogs.forget_old, "The window of a kept stream never ends.")
CLUSTER.skip("keep streams without a bound", StreamLogs._make_room, "The streams that a process keeps have no bound.")


# ---- steps in flight


@CLUSTER.bug("a step overtakes the one before it", StepStream._collect, "The newest step in flight is collected first.")
def _(original, stream, left):
    stream._launched.rotate(1)
    outputs = original(stream, left)
    stream._launched.rotate(-1)
    return outputs
