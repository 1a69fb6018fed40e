"""Ranks that divide the images of a step: each image on one of them, about evenly, its features on all, and an end where one finds no
memory."""

from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from engine.executor.image_pass import EncoderRanks, deal
from engine.images import KEY_BYTES, ImageInput
from engine.models.vision.tower import Pixels
from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.region_plan import RegionPlan
from tests.core.hash_model import NO_MEMORY
from tests.parallel.ranks_in_threads import run_ranks

SIDES = (4, 10, 2, 6, 6, 2)  # of images, in patches; a token is 2 x 2 of them


def image_of(number: int, side: int) -> ImageInput:
    size = (1, side, side)
    pixels = bytes([number] * (3 * side * side))
    return ImageInput(0, side * side // 4, bytes([number] * KEY_BYTES), (1, side, side), 2, size, pixels)


IMAGES = [image_of(number, side) for number, side in enumerate(SIDES)]


class Counts:
    """A tower whose features name the image and the row; the image whose number is `fails` finds no memory."""

    feature_size = 40

    def __init__(self, *, fails: int | None = None) -> None:
        self.fails = fails
        self.encoded: list[int] = []

    def encode(self, image: Pixels) -> Tensor:
        number, grid = int(image.pixels.view(-1)[0]), image.grid
        if number == self.fails:
            raise torch.OutOfMemoryError(NO_MEMORY)
        self.encoded.append(number)
        rows = torch.arange(self.feature_size).unsqueeze(1) + torch.arange(grid[1] * grid[2] // 4) * 100
        return (rows + 0.25 * number).to(torch.bfloat16).T  # not dense


def pixels_of(image: ImageInput) -> Pixels:
    return Pixels(torch.tensor(list(image.pixels), dtype=torch.uint8), image.grid)


def encoded_by(rank: SharedMemoryCollectives, tower: Counts, images: list[ImageInput]) -> list[Tensor]:
    encoders = EncoderRanks(dtype=torch.bfloat16, device=torch.device("cpu"), pixels=pixels_of)
    return encoders.encode(tower, images, rank)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("images", [IMAGES, IMAGES[:1]])
def test_each_image_is_encoded_once_and_all_ranks_have_its_features(ranks: int, images: list[ImageInput]) -> None:
    towers = [Counts() for _ in range(ranks)]
    found = run_ranks(RegionPlan(ranks=ranks), lambda rank: encoded_by(rank, towers[rank.rank], images))
    wanted = [Counts().encode(pixels_of(image)) for image in images]
    assert sorted(number for tower in towers for number in tower.encoded) == list(range(len(images)))
    for features in found:
        assert all(torch.equal(a, b) for a, b in zip(features, wanted, strict=True))
        memory = [x.untyped_storage().nbytes() for x in features]
        assert memory == [x.nbytes for x in features], "an image that is forgotten leaves memory behind"


def test_patches_decide_which_rank_encodes_an_image() -> None:
    towers = [Counts() for _ in range(2)]
    run_ranks(RegionPlan(ranks=2), lambda rank: encoded_by(rank, towers[rank.rank], IMAGES))
    assert [tower.encoded for tower in towers] == [[1], [0, 2, 3, 4, 5]], "100 patches on one rank, 96 on the other"


@pytest.mark.parametrize("fails", [1, 4])
def test_where_one_rank_finds_no_memory_the_others_end_with_it(fails: int) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=NO_MEMORY):
        run_ranks(RegionPlan(ranks=2), lambda rank: encoded_by(rank, Counts(fails=fails), IMAGES))


def busiest(weights: list[int], owners: list[int] | tuple[int, ...], ranks: int) -> int:
    return max(sum(w for w, owner in zip(weights, owners, strict=True) if owner == rank) for rank in range(ranks))


def test_the_heaviest_goes_first_to_the_rank_that_has_least() -> None:
    assert deal([1, 7, 2, 5, 4], 2) == [0, 0, 0, 1, 1]
    assert deal([], 3) == []


def test_equal_pieces_go_round_in_order() -> None:
    assert deal([4] * 5, 3) == [0, 1, 2, 0, 1]
    assert deal([0, 0], 2) == [0, 0], "a piece of no weight makes no rank busier"


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_each_piece_has_one_rank_and_no_rank_could_spare_its_last_one(weights: list[int], ranks: int) -> None:
    owners = deal(weights, ranks)
    assert len(owners) == len(weights) and set(owners) <= set(range(ranks)) and owners == deal(list(weights), ranks)
    loads = [busiest(weights, [0 if owner == rank else 1 for owner in owners], 1) for rank in range(ranks)]
    for rank, load in enumerate(loads):
        own = [w for w, owner in zip(weights, owners, strict=True) if owner == rank]
        assert load - min(own, default=0) <= min(loads)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
@example([3, 3, 2, 2, 2], 2)  # 7 where 6 would do: the worst of two ranks
def test_the_busiest_rank_is_within_graham_s_bound(weights: list[int], ranks: int) -> None:
    best = min(busiest(weights, way, ranks) for way in product(range(ranks), repeat=len(weights)))
    assert 3 * ranks * busiest(weights, deal(weights, ranks), ranks) <= (4 * ranks - 1) * best
