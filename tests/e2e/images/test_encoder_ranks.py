"""Two rank processes that divide images, as users start them: the answers are those of one rank."""

import base64
from pathlib import Path
from typing import Any

from engine.frontend.images.pixels import PixelMaker
from engine.frontend.images.placeholders import NO_MARKS, expanded
from engine.model_files.model_config import load_model_config
from tests.e2e.client import generate, generate_all, session
from tests.e2e.cluster import tandem
from tests.engine.engine_in_process import EngineInProcess
from tests.frontend.vision import file_of, picture
from tests.models.tiny_seeing import IMAGE, make_seeing_checkpoint

NEW = 12
FILES = [file_of(picture(64, 48, seed=1)), file_of(picture(24, 32, seed=2)), file_of(picture(40, 40, seed=3))]
ALONE = file_of(picture(48, 24, seed=4))
ASKED: list[tuple[list[int], list[bytes]]] = [
    ([20, IMAGE, 22, 23, IMAGE, 25, IMAGE, 26], FILES),
    ([30, 31, IMAGE, 32, 33], FILES[1:2]),
    (list(range(40, 60)), []),
    ([61, IMAGE, 62], [ALONE]),
]


def of_one_rank(path: str) -> list[list[int]]:
    vision = load_model_config(path).vision
    assert vision is not None
    maker = PixelMaker(vision, max_pixels=1 << 20)
    with EngineInProcess(path, max_total_tokens=2048, dtype="float32") as engine:
        for number, (ids, files) in enumerate(ASKED):
            loaded = [maker.image(data, maker.image_key(data)) for data in files]
            prompt, images = expanded(ids, loaded, vision, marks=NO_MARKS, field="input_ids")
            engine.add(str(number), prompt, max_new_tokens=NEW, wanted={"images": tuple(images)})
        engine.run()
    return [engine.tokens[str(number)] for number in range(len(ASKED))]


def body_of(ids: list[int], files: list[bytes]) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": NEW}}
    return body | ({"image_data": [base64.b64encode(data).decode() for data in files]} if files else {})


async def test_a_worker_whose_ranks_divide_images_answers_as_one_rank(tmp_path: Path) -> None:
    """Images of different sizes in one batch, then one by itself. It measures its memory, too."""
    path = make_seeing_checkpoint(tmp_path / "model", "qwen3_vl")
    flags = ("--model-path", path, "--tp-size", "2", "--mm-enable-dp-encoder", "--dtype", "float32", "--port", "0")
    with tandem(tmp_path / "worker", "serve", *flags) as worker:
        *together, alone = [body_of(ids, files) for ids, files in ASKED]
        answers = await generate_all(worker.url, together)
        async with session() as http:
            answers.append(await generate(http, worker.url, alone))
    assert [answer["output_ids"] for answer in answers] == of_one_rank(path)
