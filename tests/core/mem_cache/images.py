"""Images of tests: tokens of two by two patches of a pixel each, and prompts that have them."""

from engine.images import KEY_BYTES, ImageInput, key_ids
from engine.model_files.tower_config import HALF, ClipTower, ImageProcessing, LearnedTower, PixelRange
from engine.model_files.vision_config import VisionConfig

TOKEN = 49  # stands for a part of an image
TOWER = LearnedTower(
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    patch=1,
    merge=2,
    activation="gelu",
    rope_theta=10_000.0,
    side=4,
)
CLIP = ClipTower(
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    patch=4,
    activation="quick_gelu",
    side=3,
    taken=(1,),
    keeps_class=False,
    eps=1e-5,
    projector="gelu",
    projector_bias=True,
)
SEES = VisionConfig(
    tower=TOWER, processing=ImageProcessing(size=PixelRange(4, 400), mean=HALF, std=HALF), image_token_id=TOKEN
)


def image(number: int, *, at: int, rows: int = 2, columns: int = 3) -> ImageInput:
    """One of `rows` x `columns` tokens, whose pixels and key are `number`."""
    grid = (1, rows * 2, columns * 2)
    pixels = bytes([number] * (rows * columns * 4 * 3))
    return ImageInput(at, rows * columns, bytes([number] * KEY_BYTES), grid, 2, grid, pixels)


def prompt_of(*images: ImageInput, length: int = 20) -> list[int]:
    tokens = [token % TOKEN for token in range(length)]
    for shown in images:
        tokens[shown.start : shown.end] = [TOKEN] * shown.num_tokens
    return tokens


def read_of(*images: ImageInput, length: int = 20) -> list[int]:
    """What the hash model reads of such a prompt."""
    return key_ids(images, prompt_of(*images, length=length), 0)
