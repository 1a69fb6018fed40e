"""Parts of a model on the ranks of a TP x PP group, and checks of sizes. Pure.

  heads, KV heads, intermediate, vocabulary   split over TP ranks, in order; with DP attention
                                              the intermediate over all DP ranks' ranks
  layers                                      split over stages by bytes; the first has the
                                              embedding, the last the head

With more TP ranks than KV heads, tp_size / kv_heads ranks share one; query heads stay with theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from engine.model_files.model_config import AttentionConfig, ModelConfig
from service.flags import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Coordinates of a rank; `partition` is `--pp-layer-partition`, () balances by bytes.

    With DP attention, `dp_size` groups of `tp_size` ranks share the MLPs. `ep_size`: ranks with
    whole experts, or 1.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    ep_size: int = 1
    partition: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size, self
        assert 0 <= self.dp_rank < self.dp_size and (self.dp_size == 1 or self.pp_size == 1), self
        assert self.ep_size in (1, self.mlp_size), self

    @property
    def rank(self) -> int:
        """Number within the model; ranks are numbered by stage."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def mlp_rank(self) -> int:
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def mlp_size(self) -> int:
        return self.dp_size * self.tp_size

    def in_dp_rank(self) -> "Place":
        """The place of what a DP rank has for itself, like drafters."""
        return replace(self, dp_rank=0, dp_size=1, ep_size=self.tp_size if self.ep_size > 1 else 1)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


ALONE = Place()  # model on one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part of a rank: half-open ranges."""

    heads: range
    kv_heads: range
    vocab: range
    layers: range


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows or columns `taken` of `total` in a matrix."""

    total: int
    taken: range

    @staticmethod
    def whole(total: int) -> "Cut":
        return Cut(total, range(total))

    def times(self, size: int) -> "Cut":
        return Cut(self.total * size, range(self.taken.start * size, self.taken.stop * size))

    def within(self, total: int, *, at: int) -> "Cut":
        return Cut(total, range(at + self.taken.start, at + self.taken.stop))

    def __len__(self) -> int:
        return len(self.taken)


Extent = int | Cut  # of a tensor's dimension: all of it, or a rank's part


def cut_of(extent: Extent) -> Cut:
    return extent if isinstance(extent, Cut) else Cut.whole(extent)


def share_of(config: ModelConfig, place: Place) -> Share:
    rank, size = place.tp_rank, place.tp_size
    return Share(
        heads=_even(config.num_heads, rank, size),
        kv_heads=shared_range(config.num_kv_heads, rank, size),
        vocab=range(config.vocab_size * rank // size, config.vocab_size * (rank + 1) // size),
        layers=stage_layers(config, pp_size=place.pp_size, partition=place.partition)[place.pp_rank],
    )


def stage_layers(config: ModelConfig, *, pp_size: int, partition: Sequence[int] = ()) -> tuple[range, ...]:
    """Each stage's layers; the default minimizes the largest stage in bytes."""
    counts = list(partition) or _balanced(config, pp_size)
    assert len(counts) == pp_size and sum(counts) == config.num_layers and min(counts) > 0, counts
    return tuple(range(first, end) for first, end in pairwise(accumulate(counts, initial=0)))


def mlp_share(width: int, place: Place) -> range:
    return _even(width, place.mlp_rank, place.mlp_size)


def units_of(config: ModelConfig, place: Place, kv_units: int | None) -> range:
    """A rank's KV units of kv_heads / kv_units adjacent heads, at least one."""
    total = model_units(config, tp_size=place.tp_size, kv_units=kv_units)
    return shared_range(total, place.tp_rank, place.tp_size)


def model_units(config: AttentionConfig, *, tp_size: int, kv_units: int | None) -> int:
    return kv_units or min(tp_size, config.num_kv_heads)


def common_units(config: ModelConfig, *, tp_sizes: Sequence[int]) -> int:
    """Fewest `--kv-units` with which all these TP sizes can exchange KV."""
    return math.lcm(*(model_units(config, tp_size=size, kv_units=None) for size in tp_sizes))


def check_layout(
    config: ModelConfig,
    *,
    tp_size: int,
    pp_size: int,
    dp_size: int = 1,
    ep_size: int = 1,
    partition: Sequence[int] = (),
    kv_units: int | None = None,
    reduce_units: int = 0,
) -> None:
    """Raises ConfigError with the flag, both numbers and valid ones.

    With DP attention `tp_size` counts all ranks. `reduce_units`: 0 is off.
    """
    if ep_size > 1:
        _check_experts(config, tp_size, ep_size)
    if problem := _tp_problem(config, tp_size, dp_size, ep_size):
        most = config.num_heads * dp_size
        fitting = [
            size for size in range(1, most + 1) if _tp_problem(config, size, dp_size, min(ep_size, size)) is None
        ]
        others = f" with --dp-size {dp_size}" if dp_size > 1 else ""
        remedy = f"choose {_listed(fitting)}" if fitting else "choose another --dp-size"
        raise ConfigError(f"--tp-size {tp_size}{others}: {problem}; {remedy}")
    _check_stages(config, pp_size, partition)
    _check_attention(config, pp_size, partition)
    _check_images(config, pp_size, partition)
    if kv_units is not None:
        _check_units(config, tp_size, dp_size, kv_units)
    if reduce_units:
        _check_reduce_units(config, tp_size, reduce_units)


def _tp_problem(config: ModelConfig, tp_size: int, dp_size: int, ep_size: int) -> str | None:
    if tp_size % dp_size:
        return "DP attention needs as many ranks in each DP rank"
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, tp_size // dp_size
    each = f"a DP rank's {size} " if dp_size > 1 else ""
    if heads % size:
        return f"{each}does not divide the model's {heads} attention heads"
    if kv_heads % size and size % kv_heads:
        return f"{each}neither divides the model's {kv_heads} KV heads nor is a multiple of them"
    if config.recurrent is not None and (problem := config.recurrent.tp_problem(size)) is not None:
        return f"{each}{problem} in the model's recurrent layers"
    for name, width in _cut_sizes(config, ep_size).items():
        if width % tp_size:
            return f"does not divide the model's {name} {width}"
    if config.vocab_size < size:
        return f"{each}exceeds the model's vocabulary of {config.vocab_size}"
    return None


def _cut_sizes(config: ModelConfig, ep_size: int) -> dict[str, int]:
    if ep_size == 1:
        return config.mlp_sizes()
    assert config.experts is not None
    return {"intermediate_size": config.intermediate_size} if config.experts.dense_layers else {}


def _check_experts(config: ModelConfig, tp_size: int, ep_size: int) -> None:
    if config.experts is None:
        raise ConfigError(f"--ep-size {ep_size}: the model has no experts; leave it out")
    if ep_size != tp_size:
        raise ConfigError(
            f"--ep-size {ep_size}: each rank holds whole experts, or a part of every one; give --tp-size, {tp_size}, or 1"
        )
    count = config.experts.count
    if count % ep_size:
        fitting = [size for size in range(1, count + 1) if count % size == 0]
        raise ConfigError(
            f"--ep-size {ep_size}: does not divide the model's {count} experts; choose {_listed(fitting)}"
        )


def _check_stages(config: ModelConfig, pp_size: int, partition: Sequence[int]) -> None:
    layers = config.num_layers
    if pp_size > layers:
        raise ConfigError(f"--pp-size {pp_size}: the model has {layers} layers; choose at most {layers}")
    if not partition:
        return
    flag = f"--pp-layer-partition {','.join(map(str, partition))}"
    if len(partition) != pp_size:
        raise ConfigError(f"{flag}: names {len(partition)} stages, --pp-size is {pp_size}; give {pp_size} numbers")
    if min(partition) < 1:
        raise ConfigError(f"{flag}: a stage has {min(partition)} layers; give each at least 1")
    if sum(partition) != layers:
        raise ConfigError(f"{flag}: is {sum(partition)} layers, the model has {layers}; make the sum {layers}")


def _check_attention(config: ModelConfig, pp_size: int, partition: Sequence[int]) -> None:
    """Check that each stage has KV pages, and states if recurrent: the leader's represents all."""
    for number, stage in enumerate(stage_layers(config, pp_size=pp_size, partition=partition)):
        lacks = "" if config.kv_layers(stage) else "all of them recurrent; give each stage one with attention"
        if config.recurrent is not None and not {*config.recurrent.layers} & {*stage}:
            lacks = "none of them recurrent; give each stage one that is"
        if lacks:
            last = "the stages by --pp-layer-partition" if not partition else "other sizes"
            raise ConfigError(
                f"--pp-size {pp_size}: stage {number} has the layers {stage.start} to {stage.stop - 1}, {lacks}: choose fewer "
                f"stages, or {last}"
            )


def _check_images(config: ModelConfig, pp_size: int, partition: Sequence[int]) -> None:
    levels, first = config.deepstack_levels, len(stage_layers(config, pp_size=pp_size, partition=partition)[0])
    if first < levels:
        flag = f"--pp-layer-partition {','.join(map(str, partition))}" if partition else f"--pp-size {pp_size}"
        raise ConfigError(
            f"{flag}: the first stage has {first} layers, and images add to the states behind {levels}; give it {levels} by "
            "--pp-layer-partition"
        )


def _check_units(config: AttentionConfig, tp_size: int, dp_size: int, kv_units: int) -> None:
    kv_heads, size = config.num_kv_heads, tp_size // dp_size
    given = f"--tp-size {tp_size}" if dp_size == 1 else f"--tp-size {tp_size} over --dp-size {dp_size}"
    fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n % min(size, kv_heads) == 0]
    if kv_units in fitting:
        return
    if kv_units < 1 or kv_heads % kv_units:
        problem = f"does not divide the model's {kv_heads} KV heads"
    elif size > kv_heads:
        problem = f"{given} exceeds the model's {kv_heads} KV heads, so each head is a unit"
    else:
        problem = f"is not a multiple of {given}"
    raise ConfigError(f"--kv-units {kv_units}: {problem}; choose {_listed(fitting)}")


def _check_reduce_units(config: ModelConfig, tp_size: int, units: int) -> None:
    def fits(n: int) -> bool:
        return n % tp_size == 0 and not any(inputs % n for inputs in _reduced(config).values())

    if tp_size & (tp_size - 1):
        raise ConfigError(f"--reduce-units {units}: needs a power of two as --tp-size, got {tp_size}; leave it out")
    if units > 0 and not units & (units - 1) and fits(units):
        return
    if units < 1 or units & (units - 1):
        problem = "is not a power of two"
    elif units % tp_size:
        problem = f"is not a multiple of --tp-size {tp_size}"
    else:
        name, inputs = next((name, n) for name, n in _reduced(config).items() if n % units)
        problem = f"does not divide the model's {name} {inputs}"
    fitting = [1 << n for n in range(max(_reduced(config).values()).bit_length()) if fits(1 << n)]
    raise ConfigError(f"--reduce-units {units}: {problem}; choose {_listed(fitting)}")


def _reduced(config: ModelConfig) -> dict[str, int]:
    return {
        "num_attention_heads * head_dim": config.num_heads * config.attended_dim(),
        **config.recurrent_sizes(),
        **config.mlp_sizes(),
    }


def _even(total: int, rank: int, size: int) -> range:
    assert total % size == 0, (total, size)
    return range(total // size * rank, total // size * (rank + 1))


def shared_range(total: int, rank: int, size: int) -> range:
    """A rank's range of heads or units; one if ranks outnumber them."""
    if size <= total:
        return _even(total, rank, size)
    assert size % total == 0, (total, size)
    return range(rank * total // size, rank * total // size + 1)


def _balanced(config: ModelConfig, pp_size: int) -> list[int]:
    hidden = config.hidden_size
    layer = config.attention_weights() + hidden * round(config.mlp_matrices * config.mlp_width(active=False))
    table = hidden * config.vocab_size
    counts, sizes = [1] * pp_size, [layer] * pp_size
    sizes[0] += table
    sizes[-1] += table
    for _ in range(config.num_layers - pp_size):
        stage = sizes.index(min(sizes))
        counts[stage] += 1
        sizes[stage] += layer
    return counts


def _listed(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
