"""Memory of workers with several ranks: which rank holds which units and layers of a model."""

from dataclasses import dataclass

from transfer_backends.contract import KVArgs, RankMemory, Region

HEAD_BYTES = 4  # of a layer in a page


@dataclass(frozen=True)
class Model:
    """`heads`: KV heads. `padding`: bytes behind the last layer of a unit."""

    heads: int
    layers: int
    padding: int = 0


@dataclass(frozen=True)
class Side:
    """Ranks of a worker."""

    tp: int
    pp: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}"


def layer_bytes_of(model: Model, units: int) -> tuple[int, ...]:
    """Layers of unlike sizes, if their number is odd."""
    size, odd = HEAD_BYTES * model.heads // units, model.layers % 2
    return tuple(size * (1 + odd * (layer % 2)) for layer in range(model.layers))


def ranks_of(model: Model, side: Side, units: int, *, num_pages: int, base: int = 1 << 20) -> tuple[RankMemory, ...]:
    """The leader first: rank 0 of the last stage. More ranks than units: each unit has replicas."""
    sizes, found = layer_bytes_of(model, units), []
    for stage in reversed(range(side.pp)):
        layers = range(model.layers * stage // side.pp, model.layers * (stage + 1) // side.pp)
        for rank in range(side.tp):
            held = max(1, units // side.tp)
            item = sum(sizes[layer] for layer in layers) + model.padding
            region = Region(base + (len(found) << 24), num_pages * held, item, None)
            found.append(RankMemory(region, rank * units // side.tp, held, layers.start, len(layers)))
    return tuple(found)


def args_of(model: Model, side: Side, units: int, *, num_pages: int) -> KVArgs:
    ranks = ranks_of(model, side, units, num_pages=num_pages)
    return KVArgs(
        ranks[0].kv,
        Region(1 << 40, 4, 64, None),
        "m",
        16,
        "f32",
        kv_units=units,
        layer_bytes=layer_bytes_of(model, units),
        ranks=ranks,
    )
