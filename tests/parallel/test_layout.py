"""Which part of a model each rank holds: every part is somewhere once, and every size that does not fit is refused by name."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest

from engine.model_files.model_config import ModelConfig
from engine.model_files.recurrent_config import DeltaConfig, MambaConfig
from engine.parallel.layout import (
    Cut,
    Place,
    Share,
    check_layout,
    mlp_share,
    model_units,
    share_of,
    stage_layers,
    units_of,
)
from service.flags import ConfigError
from tests.parallel.some_config import some_config

SIZES = range(1, 17)
MAMBA = MambaConfig(
    layers=(0, 1),
    heads=8,
    head_dim=8,
    groups=2,
    state_dim=8,
    taps=4,
    conv_bias=True,
    norm="gate first",
    limits=(0.0, math.inf),
)
DELTA = DeltaConfig(layers=(0, 1), key_heads=2, value_heads=4, key_dim=8, value_dim=10, taps=4, by_key_head=False)
KV_HEADS = (1, 2, 3, 4, 6, 8)


def accepted() -> Iterator[tuple[ModelConfig, int]]:
    """Every model of these head counts with every TP size that fits it."""
    for kv_heads, group, tp in product(KV_HEADS, (1, 2, 3, 4), SIZES):
        config = some_config(num_heads=kv_heads * group, num_kv_heads=kv_heads, vocab_size=257)
        if fits(config, tp):
            yield config, tp


def fits(config: ModelConfig, tp_size: int, *, dp_size: int = 1) -> bool:
    try:
        check_layout(config, tp_size=tp_size, pp_size=1, dp_size=dp_size)
    except ConfigError:
        return False
    return True


def shares(config: ModelConfig, tp_size: int) -> list[Share]:
    return [share_of(config, Place(tp_rank=rank, tp_size=tp_size)) for rank in range(tp_size)]


def joined(ranges: Iterable[range]) -> list[int]:
    return list(chain.from_iterable(ranges))


def test_heads_intermediate_and_vocabulary_are_each_on_one_rank() -> None:
    cases = list(accepted())
    assert len(cases) > 80
    for config, tp in cases:
        ranks = shares(config, tp)
        assert joined(share.heads for share in ranks) == list(range(config.num_heads))
        mlps = (mlp_share(config.intermediate_size, Place(tp_rank=rank, tp_size=tp)) for rank in range(tp))
        assert joined(mlps) == list(range(config.intermediate_size))
        assert joined(share.vocab for share in ranks) == list(range(config.vocab_size))
        assert len({len(share.heads) for share in ranks}) == 1 and min(len(share.vocab) for share in ranks) > 0


def test_each_query_head_is_with_its_kv_head() -> None:
    for config, tp in accepted():
        group = config.num_heads // config.num_kv_heads
        for share in shares(config, tp):
            local = len(share.heads) // len(share.kv_heads)
            assert len(share.heads) == local * len(share.kv_heads)
            for place, head in enumerate(
                share.heads
            ):  # as attention counts: local head h reads local KV head h // local
                assert share.kv_heads[place // local] == head // group


def test_each_kv_head_is_on_one_rank_or_on_as_many_ranks_as_the_others() -> None:
    for config, tp in accepted():
        times = Counter(joined(share.kv_heads for share in shares(config, tp)))
        assert times == dict.fromkeys(range(config.num_kv_heads), max(1, tp // config.num_kv_heads))


def test_units_hold_the_kv_heads_of_their_rank() -> None:
    for config, tp in accepted():
        for kv_units in (None, *range(1, config.num_kv_heads + 1)):
            if kv_units is not None and not fits_units(config, tp, kv_units):
                continue
            total = model_units(config, tp_size=tp, kv_units=kv_units)
            heads = Cut(total, range(total)).times(config.num_kv_heads // total)
            assert len(heads) == config.num_kv_heads
            for rank, share in enumerate(shares(config, tp)):
                units = units_of(config, Place(tp_rank=rank, tp_size=tp), kv_units)
                assert Cut(total, units).times(config.num_kv_heads // total).taken == share.kv_heads
                assert kv_units is not None or len(units) == 1, "by default a rank holds one unit"


def fits_units(config: ModelConfig, tp_size: int, kv_units: int) -> bool:
    try:
        check_layout(config, tp_size=tp_size, pp_size=1, kv_units=kv_units)
    except ConfigError:
        return False
    return True


def test_each_layer_is_in_one_stage_and_no_cut_makes_the_largest_smaller() -> None:
    for layers, pp, vocab in product((4, 5, 28), (1, 2, 3, 4), (1, 600, 3000)):
        config = some_config(num_layers=layers, vocab_size=vocab)
        stages = stage_layers(config, pp_size=pp)
        assert joined(stages) == list(range(layers)) and min(len(stage) for stage in stages) > 0
        largest = max(stage_bytes(config, [len(stage) for stage in stages]))
        for counts in partitions(layers, pp):
            assert max(stage_bytes(config, counts)) >= largest, (layers, pp, vocab, counts)


def stage_bytes(config: ModelConfig, counts: list[int]) -> list[int]:
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    sizes = [count * layer for count in counts]
    sizes[0] += config.hidden_size * config.vocab_size
    sizes[-1] += config.hidden_size * config.vocab_size
    return sizes


def partitions(total: int, parts: int) -> Iterator[list[int]]:
    if parts == 1:
        yield [total]
        return
    for first in range(1, total - parts + 2):
        yield from ([first, *rest] for rest in partitions(total - first, parts - 1))


def test_a_partition_says_which_layers_a_stage_has() -> None:
    place = Place(pp_rank=1, pp_size=3, partition=(1, 2, 1))
    assert share_of(some_config(), place).layers == range(1, 3)
    assert not place.is_first_stage and not place.is_last_stage


def test_a_rank_alone_holds_everything() -> None:
    config = some_config()
    assert share_of(config, Place()) == Share(heads=range(8), kv_heads=range(4), vocab=range(272), layers=range(4))
    assert units_of(config, Place(), None) == range(1)
    assert Place().is_first_stage and Place().is_last_stage


def test_with_dp_attention_each_dp_rank_has_all_heads_and_all_ranks_together_the_mlp_once() -> None:
    cases = 0
    for config, attention in accepted():
        for dp in (2, 3, 4):
            if not fits(config, attention * dp, dp_size=dp):
                assert config.intermediate_size % (attention * dp)
                continue
            cases += 1
            places = [
                Place(tp_rank=rank % attention, tp_size=attention, dp_rank=rank // attention, dp_size=dp)
                for rank in range(attention * dp)
            ]
            assert [(place.mlp_rank, place.mlp_size) for place in places] == [
                (r, len(places)) for r in range(len(places))
            ]
            ranks = [share_of(config, place) for place in places]
            mlps = (mlp_share(config.intermediate_size, place) for place in places)
            assert joined(mlps) == list(range(config.intermediate_size))
            for first in range(0, len(ranks), attention):
                group = ranks[first : first + attention]
                for share, alone in zip(group, shares(config, attention), strict=True):
                    assert (share.heads, share.kv_heads, share.vocab) == (alone.heads, alone.kv_heads, alone.vocab)
    assert cases > 50


REFUSED = [
    (
        {"tp_size": 6, "dp_size": 4},
        "--tp-size 6 with --dp-size 4: DP attention needs as many ranks in each DP rank; choose 4, 8, 16 or 32",
    ),
    (
        {"tp_size": 6, "dp_size": 2},
        "--tp-size 6 with --dp-size 2: a DP rank's 3 does not divide the model's 8 attention heads; choose 2, 4, 8 or 16",
    ),
    (
        {"tp_size": 10, "dp_size": 10},
        "--tp-size 10 with --dp-size 10: does not divide the model's intermediate_size 96; choose another --dp-size",
    ),
    (
        {"tp_size": 8, "dp_size": 2, "kv_units": 2},
        "--kv-units 2: is not a multiple of --tp-size 8 over --dp-size 2; choose 4",
    ),
    ({"tp_size": 3}, "--tp-size 3: does not divide the model's 8 attention heads; choose 1, 2, 4 or 8"),
    (
        {"tp_size": 4, "num_heads": 12, "num_kv_heads": 6},
        "--tp-size 4: neither divides the model's 6 KV heads nor is a multiple of them; choose 1, 2, 3, 6 or 12",
    ),
    (
        {"tp_size": 8, "intermediate_size": 100},
        "--tp-size 8: does not divide the model's intermediate_size 100; choose 1, 2 or 4",
    ),
    ({"tp_size": 8, "vocab_size": 5}, "--tp-size 8: exceeds the model's vocabulary of 5; choose 1, 2 or 4"),
    ({"pp_size": 5}, "--pp-size 5: the model has 4 layers; choose at most 4"),
    (
        {"pp_size": 2, "partition": (1, 1, 2)},
        "--pp-layer-partition 1,1,2: names 3 stages, --pp-size is 2; give 2 numbers",
    ),
    (
        {"pp_size": 2, "partition": (1, 2)},
        "--pp-layer-partition 1,2: is 3 layers, the model has 4; make the sum 4",
    ),
    (
        {"pp_size": 2, "partition": (0, 4)},
        "--pp-layer-partition 0,4: a stage has 0 layers; give each at least 1",
    ),
    ({"kv_units": 3}, "--kv-units 3: does not divide the model's 4 KV heads; choose 1, 2 or 4"),
    ({"tp_size": 4, "kv_units": 2}, "--kv-units 2: is not a multiple of --tp-size 4; choose 4"),
    (
        {"tp_size": 8, "kv_units": 2},
        "--kv-units 2: --tp-size 8 exceeds the model's 4 KV heads, so each head is a unit; choose 4",
    ),
    (
        {"tp_size": 4, "recurrent": DELTA},
        "--tp-size 4: does not divide the 2 key heads in the model's recurrent layers; choose 1 or 2",
    ),
    (
        {"tp_size": 4, "recurrent": MAMBA},
        "--tp-size 4: does not divide the 2 groups of heads, over which there is a norm, in the model's recurrent layers; choose 1 or 2",
    ),
    (
        {"tp_size": 4, "recurrent": replace(MAMBA, norm="", heads=6)},
        "--tp-size 4: does not fit the 6 heads in 2 groups in the model's recurrent layers; choose 1 or 2",
    ),
    (
        {"pp_size": 2, "recurrent": DELTA},
        "--pp-size 2: stage 0 has the layers 0 to 1, all of them recurrent; give each stage one with attention: choose fewer stages, or "
        "the stages by --pp-layer-partition",
    ),
    (
        {"pp_size": 2, "partition": (3, 1), "recurrent": DELTA},
        "--pp-size 2: stage 1 has the layers 3 to 3, none of them recurrent; give each stage one that is: choose fewer stages, or other "
        "sizes",
    ),
    (
        {"reduce_units": 16, "recurrent": DELTA},
        "--reduce-units 16: does not divide the model's linear_num_value_heads * linear_value_head_dim 40; choose 1, 2, 4 or 8",
    ),
    ({"reduce_units": 6}, "--reduce-units 6: is not a power of two; choose 1, 2, 4, 8, 16 or 32"),
    (
        {"tp_size": 4, "reduce_units": 2},
        "--reduce-units 2: is not a multiple of --tp-size 4; choose 4, 8, 16 or 32",
    ),
    (
        {"reduce_units": 64},
        "--reduce-units 64: does not divide the model's intermediate_size 96; choose 1, 2, 4, 8, 16 or 32",
    ),
    (
        {"tp_size": 3, "num_heads": 6, "num_kv_heads": 3, "reduce_units": 4},
        "--reduce-units 4: needs a power of two as --tp-size, got 3; leave it out",
    ),
]


@pytest.mark.parametrize(("sizes", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_fit_is_refused_with_what_would(sizes: dict[str, Any], message: str) -> None:
    flags = {
        name: sizes[name]
        for name in ("tp_size", "pp_size", "dp_size", "partition", "kv_units", "reduce_units")
        if name in sizes
    }
    config = some_config(**{name: value for name, value in sizes.items() if name not in flags})
    with pytest.raises(ConfigError) as refused:
        check_layout(config, **{"tp_size": 1, "pp_size": 1, **flags})  # type: ignore[arg-type]
    assert str(refused.value) == message


def test_what_fits_is_accepted() -> None:
    check_layout(some_config(), tp_size=8, pp_size=2, partition=(3, 1), kv_units=4, reduce_units=8)
    check_layout(some_config(), tp_size=2, pp_size=4, kv_units=4, reduce_units=0)
