"""Pixels of images: equal to those of transformers' processors, in the sizes of these; and which tokens stand for them."""

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import (
    CLIPImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
)

from engine.frontend.images.pixels import PixelMaker, video_size
from engine.frontend.images.placeholders import NO_MARKS, LoadedMedia, Marks, expanded, with_times
from engine.images import ImageInput, rope_delta
from engine.model_files.model_config import load_model_config
from engine.model_files.tower_config import PixelRange
from service.images.bodies import BadImage
from tests.frontend.vision import NAMES, PROCESSORS, file_of, picture, tokenizer, write_vision_checkpoint

SIZES = [(1, 1), (28, 28), (30, 57), (97, 64), (64, 640), (33, 6600), (640, 480), (225, 224), (3, 500)]  # width, height
EXIF_ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PixelMaker]:
    folders = {family: write_vision_checkpoint(tmp_path_factory.mktemp(family), family) for family in PROCESSORS}
    visions: dict[str, Any] = {family: load_model_config(str(folder)).vision for family, folder in folders.items()}
    return {family: PixelMaker(vision, max_pixels=1 << 24) for family, vision in visions.items()}


def made(maker: PixelMaker, data: bytes) -> ImageInput:
    (part,) = maker.image(data, maker.image_key(data)).parts
    assert part.num_tokens == maker.count_image(data)
    return part


def as_qwen(processor: Qwen2VLImageProcessorPil, part: ImageInput) -> Any:
    image = as_clip(processor, part)
    sizes = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
    patches, rows, columns = processor.patchify(image, *sizes)
    assert part.grid == (1, rows, columns)
    return patches


def as_clip(processor: CLIPImageProcessorPil | Qwen2VLImageProcessorPil, part: ImageInput) -> Any:
    frames, height, width = part.size
    pixels = np.frombuffer(part.pixels, np.uint8).reshape(frames, height, width, 3)[0].transpose(2, 0, 1)
    image = processor.rescale(pixels, processor.rescale_factor)
    return processor.normalize(image, processor.image_mean, processor.image_std)


def pictures() -> dict[str, Image.Image]:
    kinds = {f"{width}x{height}": picture(width, height, seed=width) for width, height in SIZES}
    kinds |= {mode: picture(90, 61, mode=mode, seed=3) for mode in ("L", "LA", "RGBA", "1", "I;16")}
    palette = picture(90, 61).quantize(16)
    palette.info["transparency"] = 3
    return kinds | {"palette": picture(90, 61).quantize(64), "transparent palette": palette}


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_pixels_are_those_of_the_processors_of_qwen(makers: dict[str, PixelMaker], family: str) -> None:
    maker, processor = makers[family], Qwen2VLImageProcessorPil(**PROCESSORS[family])
    for kind, image in pictures().items():
        part = made(maker, file_of(image))
        wanted = processor(images=[reopened(file_of(image))], return_tensors="np")
        assert np.array_equal(as_qwen(processor, part), wanted["pixel_values"]), kind
        assert part.grid == tuple(wanted["image_grid_thw"][0]), kind
        assert part.num_tokens == np.prod(part.grid) // 4, kind


@pytest.mark.parametrize("processor_class", [CLIPImageProcessorPil, LlavaImageProcessorPil])
def test_pixels_are_those_of_the_processors_of_llava(makers: dict[str, PixelMaker], processor_class: Any) -> None:
    maker, processor = makers["llava"], processor_class(**PROCESSORS["llava"])
    for kind, image in pictures().items():
        part = made(maker, file_of(image))
        wanted = processor(images=[reopened(file_of(image))], return_tensors="np")["pixel_values"][0]
        assert np.array_equal(as_clip(processor, part), wanted), kind
        assert (part.num_tokens, part.grid, part.size) == (16, (16, 1, 1), (1, 56, 56)), kind
        assert rope_delta([part]) == 0, "positions have one dimension"


def reopened(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_each_format_is_decoded_as_pillow_does(makers: dict[str, PixelMaker], format: str) -> None:
    processor = Qwen2VLImageProcessorPil(**PROCESSORS["qwen2.5"])
    data = file_of(picture(97, 64), format)
    wanted = processor(images=[reopened(data)], return_tensors="np")["pixel_values"]
    assert np.array_equal(as_qwen(processor, made(makers["qwen2.5"], data)), wanted)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_upright(makers: dict[str, PixelMaker], orientation: int) -> None:
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    upright, turned = picture(112, 56), file_of(picture(112, 56), exif=exif)
    part = made(makers["qwen2.5"], turned)
    assert part.size[1:] == ((112, 56) if orientation > 4 else (56, 112))
    assert (part.pixels == upright.tobytes()) == (orientation == 1)


def test_an_animation_is_its_first_frame(makers: dict[str, PixelMaker]) -> None:
    first, second = picture(56, 56, seed=1).quantize(8), picture(56, 56, seed=2).quantize(8)
    for format in ("GIF", "WEBP"):
        moving = file_of(first, format, save_all=True, append_images=[second], lossless=True)
        still = file_of(first, format, lossless=True)
        assert made(makers["qwen2.5"], moving).pixels == made(makers["qwen2.5"], still).pixels, format


def test_keys_are_of_all_that_decides_the_pixels(makers: dict[str, PixelMaker]) -> None:
    one, other = file_of(picture(56, 56, seed=1)), file_of(picture(56, 56, seed=2))
    qwen, llava = makers["qwen2.5"], makers["llava"]
    keys = [qwen.image_key(one), qwen.image_key(other), llava.image_key(one), qwen.video_key([one], 2.0)]
    keys += [qwen.video_key([one, other], 2.0), qwen.video_key([other, one], 2.0), qwen.video_key([one], 1.0)]
    assert len(set(keys)) == len(keys) and all(len(key) == 32 for key in keys)
    assert qwen.image_key(one) == made(qwen, one).key == made(qwen, one).key


def test_places_grow_as_those_of_the_processor_of_llava(makers: dict[str, PixelMaker]) -> None:
    """By its tokens: the processors of Qwen need torchvision."""
    files = [file_of(picture(90, 61)), file_of(picture(56, 200))]
    processor = LlavaProcessor(
        LlavaImageProcessorPil(**PROCESSORS["llava"]),
        PreTrainedTokenizerFast(tokenizer_object=tokenizer(), additional_special_tokens=list(NAMES)),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=NAMES[3],
    )
    text = f"a{NAMES[3]}b{NAMES[3]}c"
    wanted = processor(images=[reopened(data) for data in files], text=text)["input_ids"]
    maker = makers["llava"]
    loaded = [maker.image(data, maker.image_key(data)) for data in files]
    ids, images = expanded(tokenizer().encode(text).ids, loaded, maker.vision, marks=NO_MARKS, field="text")
    assert [ids] == wanted and [image.start for image in images] == [1, 18]


def frames(count: int, width: int = 56, height: int = 84) -> list[bytes]:
    return [file_of(picture(width, height, seed=seed)) for seed in range(count)]


def video(maker: PixelMaker, files: list[bytes], fps: float = 2.0) -> LoadedMedia:
    loaded = maker.video(files, fps, maker.video_key(files, fps))
    assert sum(part.num_tokens for part in loaded.parts) == maker.count_video(files)
    return loaded


def test_a_video_of_qwen_2_5_is_one_run_of_tokens(makers: dict[str, PixelMaker]) -> None:
    (part,) = video(makers["qwen2.5"], frames(5)).parts
    time, rows, columns = part.grid
    assert time == 3 and part.size[0] == 5 and part.num_tokens == time * rows * columns // 4
    assert len(part.pixels) == 5 * part.size[1] * part.size[2] * 3
    assert part.time_step == 2 and video(makers["qwen2.5"], frames(2), fps=1.0).parts[0].time_step == 4
    with pytest.raises(BadImage, match="3 frames a second"):
        video(makers["qwen2.5"], frames(2), fps=3.0)


def test_a_video_of_qwen_3_is_an_image_for_each_temporal_patch(makers: dict[str, PixelMaker]) -> None:
    loaded = video(makers["qwen3"], frames(5))
    assert [part.size[0] for part in loaded.parts] == [2, 2, 1] and len({part.key for part in loaded.parts}) == 3
    assert {part.grid[0] for part in loaded.parts} == {1} and loaded.times_s == (0.25, 1.25, 2.0)
    assert loaded.parts[0].pixels[: len(loaded.parts[0].pixels) // 2] != loaded.parts[2].pixels


@pytest.mark.parametrize("fps", [1.0, 2.0, 3.0, 10.0, 24.0, 29.97])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_timestamps_are_those_of_transformers(makers: dict[str, PixelMaker], count: int, fps: float) -> None:
    """Its processor of Qwen3-VL without the video processor, which needs torchvision."""
    maker, marks = makers["qwen3"], Marks("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    loaded = video(maker, frames(1, 56, 56) * count, fps)
    processor = object.__new__(Qwen3VLProcessor)
    processor.video_processor = SimpleNamespace(merge_size=1, temporal_patch_size=2)
    processor.video_token = marks.video
    processor.vision_start_token, processor.vision_end_token = marks.start, marks.end
    metadata = SimpleNamespace(fps=fps, frames_indices=list(range(count)))
    inputs = {"video_grid_thw": np.array([[-(-count // 2), 1, 1]]), "video_metadata": [metadata]}
    theirs = processor.replace_video_token(inputs, 0)
    assert with_times(f"a{marks.start}{marks.video}{marks.end}b", [loaded], marks) == f"a{theirs}b"
    assert with_times(f"a{marks.video}b", [loaded], marks) == f"a{theirs}b"


def test_frames_have_one_size(makers: dict[str, PixelMaker]) -> None:
    with pytest.raises(BadImage, match="frame 2 has another size"):
        video(makers["qwen3"], [*frames(2), *frames(1, 28, 28)])


def test_sizes_of_videos_are_those_of_transformers() -> None:
    """Of `smart_resize` in its video processor of Qwen3-VL, which needs torchvision: computed by hand from its rules."""
    range_ = PixelRange(4096, 25165824, over_frames=True)
    sizes = {
        (n, size): video_size(range_, size, factor=32, frames=n, temporal_patch=2)
        for n in (1, 2, 5, 64)
        for size in ((480, 640), (20, 100), (1080, 1920))
    }
    assert sizes[1, (480, 640)] == (480, 640) and sizes[5, (20, 100)] == (32, 160)
    assert sizes[64, (1080, 1920)] == (448, 832)  # beta = sqrt(64 * 1080 * 1920 / 25165824) = 2.2964
    with pytest.raises(BadImage, match="one side may be 200 times"):
        video_size(range_, (10, 4000), factor=32, frames=2, temporal_patch=2)


def test_a_file_of_too_many_pixels_is_refused_by_its_header(makers: dict[str, PixelMaker]) -> None:
    small = PixelMaker(makers["qwen2.5"].vision, max_pixels=64 * 64 - 1)
    with pytest.raises(BadImage, match="more than 4095 pixels; send a smaller one"):
        small.count_image(file_of(picture(64, 64))[:100])  # nothing but the header is there


def test_a_strip_is_refused(makers: dict[str, PixelMaker]) -> None:
    for width, height in ((1, 201), (201, 1)):
        with pytest.raises(BadImage, match=f"has {width} x {height} pixels; one side may be 200 times the other"):
            makers["qwen2.5"].count_image(file_of(picture(width, height)))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_a_cut_file_is_refused(makers: dict[str, PixelMaker], format: str) -> None:
    data = file_of(picture(300, 200), format)
    with pytest.raises(BadImage, match=r"is it whole|no image"):
        made(makers["qwen2.5"], data[: len(data) // 2])


@pytest.mark.parametrize(
    "data", [b"", b"<svg/>", b"%PDF-1.7", file_of(picture(9, 9), "TIFF"), file_of(picture(16, 16), "ICO")]
)
def test_other_files_are_refused(makers: dict[str, PixelMaker], data: bytes) -> None:
    with pytest.raises(BadImage, match=r"no image that can be read.*send JPEG, PNG, WEBP, GIF, BMP"):
        makers["qwen2.5"].count_image(data)
