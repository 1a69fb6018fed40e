"""A checkpoint that sees, for the frontend's tests: a byte is a token, and those of images have names; and image files."""

import base64
import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from PIL import Image

from tests.frontend.conftest import SIZES, byte_backend

START, END, IMAGE, VIDEO = 257, 258, 259, 260
NAMES = ("<s>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FACTOR = 28  # pixels of a side of a token
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif p['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = {**SIZES, "vocab_size": 270}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_ROPE = {"mrope_section": [2, 1, 1], "type": "default"}
_QWEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}
_CLIP = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2},
    **{"image_size": 56, "patch_size": 14, "model_type": "clip_vision_model"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5": {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "text_config": {**TEXT, "model_type": "qwen2_5_vl_text", "rope_scaling": _ROPE},
        "vision_config": {**_QWEN, "patch_size": 14, "fullatt_block_indexes": [0], "tokens_per_second": 2}, **TOKENS},
    "qwen3": {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
        "text_config": {**TEXT, "model_type": "qwen3_vl_text", "rope_scaling": _ROPE},
        "vision_config": {**_QWEN, "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **TOKENS},
    "llava": {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
        "text_config": {**TEXT, "model_type": "llama"}, "vision_config": _CLIP, "image_token_index": IMAGE},
}  # fmt: skip
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2.5": {"min_pixels": 4 * FACTOR**2, "max_pixels": 64 * FACTOR**2},
    "qwen3": {"size": {"shortest_edge": 4 * FACTOR**2, "longest_edge": 64 * FACTOR**2}, "patch_size": 14},
    "llava": {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
}


@cache
def tokenizer() -> tokenizers.Tokenizer:
    return byte_backend(*NAMES)


def write_vision_checkpoint(folder: Path, family: str = "qwen2.5", *, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    return folder


def picture(width: int, height: int, *, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Coarse noise: it survives compression, and no two places are alike."""
    rng = random.Random(seed)
    if mode == "I;16":
        return Image.frombytes(mode, (width, height), rng.randbytes(2 * width * height))
    image = Image.frombytes("RGBA", (7, 5), rng.randbytes(35 * 4)).resize((width, height), Image.Resampling.BICUBIC)
    return image if mode == "RGBA" else image.convert(mode)


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


def frames_url(*frames: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(map(base64_of, frames))
