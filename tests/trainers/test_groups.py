"""Process groups that a real trainer process opens: tensors arrive, and a trainer that dies or freezes leaves the old weights."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from engine.messages import JoinTrainer, NewTensors
from engine.ranks.followers import Followers
from engine.trainers.groups import GroupTrainers, TrainerGroups
from service.flags import ConfigError
from tests.cells import in_turn, some
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.trainers.trainer import GROUP, Trainer, trainer

PROMPT = prompt_of(40, 1)
DEADLINE_S = 60.0
SHORT_S = 2.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("trained")
    first, second = (make_tiny_checkpoint(folder / str(seed), "qwen3", seed=seed) for seed in (1, 2))
    return first, second


def names_of(checkpoint: str) -> list[str]:
    return sorted(load_file(Path(checkpoint) / "model.safetensors"))


def answer(engine: EngineInProcess, rid: str) -> list[int]:
    engine.parts.scheduler.flush_cache()
    return engine.answer(rid, PROMPT, max_new_tokens=8)


def take(engine: EngineInProcess, source: Trainer, names: list[str]) -> None:
    weights = engine.parts.weights
    read = weights.read(weights.model_path, when_done=lambda: None, tensors=source.tensors(names))
    source.send(names)
    weights.take(read.result(DEADLINE_S), model_path=weights.model_path, version="2")
    source.await_line("sent")


@pytest.mark.parametrize(("tp", "pp"), some([(1, 1), (2, 1), (1, 2)], tried=[(2, 1)]))
def test_every_rank_joins_and_takes_its_part(checkpoints: tuple[str, str], tp: int, pp: int) -> None:
    """In two calls that part the matrices of a layer."""
    first, second = checkpoints
    with EngineInProcess(second) as other:
        wanted = answer(other, "a")
    names = names_of(second)
    with (
        trainer(second, ranks=tp * pp) as source,
        ranks(first, tp_size=tp, pp_size=pp, dist_timeout_s=DEADLINE_S, num_threads=1) as group,
    ):
        engine = group.engine
        assert answer(engine, "before") != wanted
        engine.parts.trainers.join(source.join())
        source.await_line("open")
        with pytest.raises(ConfigError, match=r"group_name: .* is open already"):
            engine.parts.trainers.join(source.join())
        for part in (names[::2], names[1::2]):
            take(engine, source, part)
        engine.parts.trainers.leave(GROUP)
        assert answer(engine, "after") == wanted
        assert all(follower._prepared == {} for follower in group.followers.values())


@pytest.mark.parametrize(("end", "tp_size"), in_turn(["kill", "freeze"], [2, 1]))
def test_a_trainer_that_ends_in_the_middle_changes_nothing(
    checkpoints: tuple[str, str], end: str, tp_size: int
) -> None:
    first, second = checkpoints
    names = names_of(second)
    with (
        ranks(first, tp_size=tp_size, dist_timeout_s=DEADLINE_S if end == "kill" else SHORT_S, num_threads=1) as group,
        trainer(second, ranks=tp_size) as source,
    ):
        engine, weights = group.engine, group.engine.parts.weights
        before = answer(engine, "before")
        engine.parts.trainers.join(source.join())
        source.await_line("open")
        read = weights.read(weights.model_path, when_done=lambda: None, tensors=source.tensors(names))
        source.send(names[:3])
        source.await_line("sent")
        getattr(source, end)()
        with pytest.raises(ConfigError, match=f"group_name: '{GROUP}' broke at tensor .* nothing has changed"):
            read.result(DEADLINE_S)
        again = weights.read(weights.model_path, when_done=lambda: None, tensors=source.tensors(names))
        with pytest.raises(ConfigError, match="group_name: no group 'weight_update_group' is open"):
            again.result(DEADLINE_S)
        assert answer(engine, "after") == before and weights.source == "checkpoint"


def test_joins_that_cannot_be_are_refused(checkpoints: tuple[str, str]) -> None:
    groups = TrainerGroups(rank=1, num_ranks=2, timeout_s=SHORT_S)
    with trainer(checkpoints[0], ranks=2) as source:
        with pytest.raises(ConfigError, match="rank_offset: 1 makes this worker's rank 1 rank 4 of 3"):
            groups.join(source.join(dp_rank=1))
        with pytest.raises(ConfigError, match=r"master_address: rank 2 of 3 cannot join .* within 2 s"):
            groups.join(source.join())  # the other rank does not come
        source.kill()
        with pytest.raises(ConfigError, match="master_address"):
            groups.join(source.join())
    with pytest.raises(ConfigError, match="group_name: no group"):
        groups.leave(GROUP)
    with pytest.raises(ConfigError, match="--nnodes 2"):
        TrainerGroups(rank=0, num_ranks=1, timeout_s=SHORT_S, refusal="--nnodes 2").join(source.join())


def test_a_group_gives_tensors_in_order(checkpoints: tuple[str, str]) -> None:
    groups = TrainerGroups(rank=0, num_ranks=1, timeout_s=DEADLINE_S)
    with trainer(checkpoints[0]) as source:
        groups.join(source.join())
        names = names_of(checkpoints[0])[:4]
        sender = threading.Thread(target=source.send, args=(names,))
        sender.start()
        found = groups.receive(source.tensors(names))
        sender.join()
        stored = load_file(source.path)
        assert list(found) == names and all(torch.equal(found[name], stored[name]) for name in names)
        with pytest.raises(ConfigError, match="no group 'other'"):
            groups.receive(NewTensors(group="other"))
        groups.leave(GROUP)


def test_a_leader_that_cannot_join_waits_for_its_followers_and_all_leave() -> None:
    """One that still joins would keep the group, and refuse the next of this name."""
    calls: list[str] = []

    def call(name: str, **args: object) -> SimpleNamespace:
        calls.append(name)
        return SimpleNamespace(number=1, wait=lambda: calls.append(f"{name} ended"))

    followers = cast(Followers, SimpleNamespace(prepare=call, apply=call))
    group = GroupTrainers(TrainerGroups(rank=0, num_ranks=2, timeout_s=1.0), followers)
    asked = JoinTrainer("j", GROUP, "h", 1, rank_offset=2, world_size=2, backend="gloo")
    with pytest.raises(ConfigError, match="rank_offset: 2 makes this worker's rank 0 rank 2 of 2"):
        group.join(asked)
    joining, leaving = ["join_trainer", "join_trainer ended"], ["leave_trainer", "leave_trainer ended"]
    assert calls == [*joining, "forget", "forget ended", *leaving]
