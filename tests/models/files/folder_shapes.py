"""Folders after checkpoints that people serve, made here with small vocabularies: what each of their files says, as data.

Chat templates are ours: short ones that read what those of the family read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from tests.models.tiny_checkpoints import tiny_config, write_json

BYTES, LLAMA2, MISTRAL, GEMMA = "bytes", "llama2", "mistral", "gemma"  # how a tokenizer.json spells text
WORDS = ("hello", "world", "user", "the", "tool")
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAST, LLAMA, QWEN = "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"
TRAINED = 4096  # max_position_embeddings of all


def chat(turn: str, *, start: str = "", tools: str = "", ask: str = "") -> str:
    """A chat template: `turn` of each message m, `tools` before them where the request has some."""
    shown = f"{{% if tools %}}{tools}{{% endif %}}" if tools else ""
    asked = f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    return f"{start}{shown}{{% for m in messages %}}{turn}{{% endfor %}}{asked}"


CHATML = chat("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", ask="<|im_start|>assistant\n")
HERMES = chat(
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
    tools="<|im_start|>system\n<tools>{{ tools | tojson }}</tools><|im_end|>\n",
    ask="<|im_start|>assistant\n",
)
HEADERS = chat(
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
    start="{{ bos_token }}",
    tools="<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson(indent=4) }}<|eot_id|>",
    ask="<|start_header_id|>assistant<|end_header_id|>\n\n",
)
INST = chat(
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}",
    start="{{ bos_token }}",
    tools="[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]",
)
TURNS = chat(
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n",
    start="{{ bos_token }}",
    ask="<start_of_turn>model\n",
)
HARMONY = chat(
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
    start="<|start|>system<|message|>{{ strftime_now('%Y') | length }}<|end|>",
    tools="<|start|>developer<|message|>{{ tools | tojson }}<|end|>",
    ask="<|start|>assistant",
)
PARTS = chat(
    "{{ m.role | upper }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endif %} ",
    ask="ASSISTANT:",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One folder. `special`, `plain`: added tokens, which answers hide or show. `post`: the template of tokenizer.json.

    `config`, `generation`: ends in config.json and generation_config.json, by text; `unnamed`: others, which no file names.
    `fields`: of config.json. `files`: others, by path. `padding`: rows of the model without a token.
    `generic`: compared with transformers' generic class, which reads tokenizer.json alone; with AutoTokenizer else.
    `before`, `behind`: tokens that transformers 5 does not add. `why`: the engines differ here, and which one the row follows.
    """

    name: str
    family: str
    spelling: str = BYTES
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    post: str = ""
    tokenizer: dict[str, Any]
    config: tuple[str, ...] = ()
    generation: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    context: int = TRAINED
    padding: int = 0
    generic: bool = False
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    why: str = ""


def _yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}}


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_scaling": {**scaling, "original_max_position_embeddings": 512}}


def _object(text: str) -> dict[str, Any]:
    """A special token as files before transformers 4.34 have it."""
    return {
        "__type": "AddedToken",
        "content": text,
        "lstrip": False,
        "normalized": True,
        "rstrip": False,
        "single_word": False,
    }


_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>"),
)
_SPM = ("<unk>", "<s>", "</s>")
_SPM_NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GEMMA_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
_GEMMA_NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "depth": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
}
_VISION |= {"fullatt_block_indexes": [1]}
_QWEN_NAMES = {"tokenizer_class": QWEN, "add_bos_token": False, "bos_token": None, "pad_token": "<|endoftext|>"}
_IM_END = {**_QWEN_NAMES, "eos_token": "<|im_end|>"}
_METASPACE = "transformers 5 and SGLang on it build Metaspace anew for the class; ids follow tokenizer.json, as in transformers 4"


def _names(kind: str, bos: str | None = None, eos: str | None = None, **more: Any) -> dict[str, Any]:
    named = {"bos_token": bos, "eos_token": eos}
    return {"tokenizer_class": kind, **{name: text for name, text in named.items() if text}, **more}


_LLAMA2 = Shape(
    name="Llama 2",
    family="llama",
    spelling=LLAMA2,
    special=_SPM,
    post="<s> $A",
    tokenizer={
        **{"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False},
        **{name: _object(text) for name, text in _SPM_NAMES.items()},
        "chat_template": INST,
    },
    config=("</s>",),
    generation=("</s>",),
    generic=True,
    why=_METASPACE,
)
TINYLLAMA = replace(  # of which GGUF files are made
    _LLAMA2,
    name="TinyLlama",
    tokenizer={"tokenizer_class": "LlamaTokenizer", **_SPM_NAMES},
    generation=(),
    generic=False,
    why="",
)
_LLAMA3 = Shape(
    name="Llama 3.1",
    family="llama",
    special=_LLAMA3_TOKENS,
    post="<|begin_of_text|> $A",
    tokenizer=_names(FAST, "<|begin_of_text|>", "<|eot_id|>", chat_template=HEADERS),
    config=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    generation=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    fields=_llama3(8.0),
)
_QWEN3 = Shape(
    name="Qwen 3",
    family="qwen3",
    special=_QWEN_TOKENS,
    plain=("<think>", "</think>"),
    tokenizer={**_IM_END, "chat_template": HERMES},
    config=("<|im_end|>",),
    generation=("<|im_end|>", "<|endoftext|>"),
    fields=_yarn(4.0, 3072),
    context=12288,
    padding=26,
)
_GEMMA2 = Shape(
    name="Gemma 2",
    family="gemma2",
    spelling=GEMMA,
    special=_GEMMA_TOKENS,
    post="<bos> $A",
    tokenizer=_names("GemmaTokenizer", add_bos_token=True, add_eos_token=False, **_GEMMA_NAMES, chat_template=TURNS),
    config=("<eos>", "<end_of_turn>"),
    generation=("<eos>",),
)
SHAPES = [
    _LLAMA2,
    replace(
        _LLAMA3,
        name="Llama 3",
        special=_LLAMA3_TOKENS[:4] + _LLAMA3_TOKENS[5:],
        config=("<|end_of_text|>",),
        generation=(),
        fields={},
    ),
    _LLAMA3,
    replace(
        _LLAMA3,
        name="Llama 4",
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"),
        tokenizer=_names("PreTrainedTokenizer", "<|begin_of_text|>", "<|eot|>"),
        config=("<|end_of_text|>", "<|eom|>", "<|eot|>"),
        generation=(),
        fields={},
        files={
            "chat_template.json": {"chat_template": HEADERS.replace("_id|", "|")},
            "chat_template.jinja": HEADERS.replace("<|eot_id|>", "<|eot|>"),
        },
    ),
    replace(
        _LLAMA3,
        name="Llama Guard 3",
        tokenizer={**_LLAMA3.tokenizer, "chat_template": PARTS},
        config=("<|end_of_text|>", "<|eot_id|>"),
        generation=(),
        unnamed=("<|eom_id|>",),
        fields=_llama3(32.0),
        why="SGLang takes <|eom_id|> for an end of every tokenizer that has it; vLLM follows the files",
    ),
    replace(
        _QWEN3,
        name="Qwen 2.5",
        family="qwen2",
        plain=("<tool_call>", "</tool_call>"),
        fields=_yarn(4.0, TRAINED),
        context=4 * TRAINED,
        why="vLLM serves factor x original of YaRN, SGLang max_position_embeddings where the original length is named",
    ),
    _QWEN3,
    Shape(
        name="Qwen 3 Embedding",
        family="qwen3",
        special=_QWEN_TOKENS,
        post="$A <|endoftext|>",
        tokenizer=_QWEN3.tokenizer,
        config=("<|endoftext|>",),
    ),
    replace(
        _QWEN3,
        name="Qwen 3 Coder",
        family="qwen3_moe",
        plain=("<tool_call>", "</tool_call>"),
        tokenizer=_IM_END,
        fields={},
        files={"chat_template.jinja": HERMES},
        context=TRAINED,
        padding=0,
    ),
    replace(
        _LLAMA2,
        name="Mistral 7B v0.3",
        family="mistral",
        spelling=MISTRAL,
        special=(*_SPM, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        tokenizer={
            **_LLAMA2.tokenizer,
            **_SPM_NAMES,
            "chat_template": [{"name": "default", "template": INST}, {"name": "tool_use", "template": INST}],
        },
    ),
    replace(
        _LLAMA2,
        name="Mistral Nemo",
        family="mistral",
        spelling=BYTES,
        special=(*_SPM, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        tokenizer=_names(FAST, add_bos_token=True, add_prefix_space=False, **_SPM_NAMES, chat_template=INST),
        generation=(),
        why="transformers 5 has a class of its own for Mistral's folders, SGLang and vLLM their mistral_common",
    ),
    _GEMMA2,
    replace(
        _GEMMA2,
        name="Gemma 3",
        family="gemma3_text",
        tokenizer=_names("GemmaTokenizer", extra_special_tokens={}, **_GEMMA_NAMES),
        generation=("<eos>", "<end_of_turn>"),
        fields={"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        files={"chat_template.json": {"chat_template": TURNS}},
        why="max_position_embeddings is with the scaling, so that vLLM does not multiply it",
    ),
    Shape(
        name="Phi 4",
        family="phi3",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"),
        tokenizer=_names(
            "GPT2Tokenizer",
            "<|endoftext|>",
            "<|im_end|>",
            unk_token="<|endoftext|>",
            chat_template=CHATML.replace("\n", "<|im_sep|>", 1),
        ),
        config=("<|endoftext|>", "<|im_end|>"),
        padding=12,
    ),
    Shape(
        name="DeepSeek V3",
        family="deepseek_v3",
        special=_DEEPSEEK[:2],
        plain=_DEEPSEEK[2:],
        tokenizer=_names(
            LLAMA,
            add_bos_token=True,
            add_eos_token=False,
            bos_token=_object(_DEEPSEEK[0]),
            eos_token=_object(_DEEPSEEK[1]),
            chat_template=chat(
                "{{ '<｜User｜>' if m.role == 'user' else '<｜Assistant｜>' }}{{ m.content }}", start="{{ bos_token }}"
            ),
        ),
        config=(_DEEPSEEK[1],),
        generation=(_DEEPSEEK[1],),
        fields=_yarn(8.0, 512, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1),
        padding=9,
        before=_DEEPSEEK[:1],
        why="transformers 5 drops add_bos_token beside a tokenizer.json; SGLang and transformers 4 add BOS for LlamaTokenizer",
    ),
    Shape(
        name="Hermes 2 Pro",
        family="llama",
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        plain=("<tool_call>", "</tool_call>"),
        post="<|begin_of_text|> $A",
        tokenizer=_names(
            FAST,
            "<|begin_of_text|>",
            "<|im_end|>",
            chat_template=[{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES}],
        ),
        config=("<|im_end|>",),
    ),
    Shape(
        name="Command R",
        family="llama",
        special=("<PAD>", "<UNK>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
        post="<BOS_TOKEN> $A",
        tokenizer=_names(
            "CohereTokenizerFast", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", add_bos_token=True, add_eos_token=False
        ),
        config=("<|END_OF_TURN_TOKEN|>",),
        fields={"model_max_length": 2 * TRAINED},
        files={
            "chat_template.jinja": CHATML,
            "additional_chat_templates/tool_use.jinja": HERMES,
            "additional_chat_templates/rag.jinja": TURNS,
        },
        context=2 * TRAINED,
        generic=True,
        why="transformers 5 builds the class anew; model_max_length counts for SGLang and vLLM",
    ),
    replace(
        _LLAMA2,
        name="a ChatML fine-tune of Mistral 0.1",
        family="mistral",
        special=(*_SPM, "<|im_end|>"),
        plain=("<|im_start|>",),
        tokenizer=_names(LLAMA, "<s>", add_bos_token=True, add_eos_token=False, chat_template=CHATML),
        files={
            "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<s>"}
        },
    ),
    Shape(
        name="GLM 4.5",
        family="glm4_moe",
        special=("<|endoftext|>", "[MASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        plain=("<think>", "</think>", "<tool_call>"),
        tokenizer=_names(
            FAST,
            do_lower_case=False,
            eos_token="<|endoftext|>",
            pad_token="<|endoftext|>",
            additional_special_tokens=["<|endoftext|>", "[MASK]", "<sop>", "<|user|>", "<|observation|>"],
        ),
        config=("<|endoftext|>", "<|user|>", "<|observation|>"),
        generation=("<|endoftext|>", "<|user|>", "<|observation|>"),
        files={
            "chat_template.jinja": chat(
                "<|{{ m.role }}|>\n{{ m.content }}", start="[gMASK]<sop>", tools="{{ tools | tojson }}"
            )
        },
        padding=14,
    ),
    Shape(
        name="Kimi K2",
        family="deepseek_v3",
        special=("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "[PAD]"),
        tokenizer=_names(
            FAST, "[BOS]", "[EOS]", pad_token="[PAD]", additional_special_tokens=["<|im_end|>", "<|im_user|>"]
        ),
        config=("<|im_end|>",),
        generation=("<|im_end|>",),
        fields=_yarn(32.0, 128, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=0.5),
        files={
            "chat_template.jinja": chat(
                "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>",
                tools="<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>",
                ask="<|im_assistant|>assistant<|im_middle|>",
            )
        },
    ),
    Shape(
        name="gpt-oss",
        family="gpt_oss",
        special=("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>"),
        tokenizer=_names(FAST, "<|startoftext|>", "<|return|>"),
        config=("<|return|>",),
        generation=("<|return|>", "<|endoftext|>", "<|call|>"),
        fields={"rope_scaling": {**_yarn(32.0, 128)["rope_scaling"], "rope_type": "yarn", "truncate": False}},
        files={"chat_template.jinja": HARMONY},
    ),
    replace(
        _LLAMA2,
        name="LLaVA 1.5",
        family="llava",
        special=(*_SPM, "<image>", "<pad>"),
        tokenizer=_names("LlamaTokenizer", add_bos_token=True, image_token="<image>", pad_token="<pad>", **_SPM_NAMES),
        config=(),
        files={"chat_template.json": {"chat_template": PARTS}},
        padding=6,
        generic=False,
        why="",
    ),
    replace(
        _QWEN3,
        name="Qwen 2.5 VL",
        family="qwen2_5_vl",
        special=(*_QWEN_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        plain=(),
        fields={"rope_scaling": {**_yarn(4.0, TRAINED)["rope_scaling"], "mrope_section": [4, 2, 2]}},
        files={"chat_template.json": {"chat_template": CHATML}},
        context=4 * TRAINED,
        padding=0,
    ),
    Shape(
        name="SmolLM 2",
        family="llama",
        special=_QWEN_TOKENS,
        tokenizer=_names(
            "GPT2Tokenizer",
            "<|im_start|>",
            "<|im_end|>",
            add_prefix_space=False,
            unk_token="<|endoftext|>",
            chat_template=CHATML,
        ),
        config=("<|im_end|>",),
        generic=True,
        why="transformers 5 cuts digits as GPT-2 does; ids follow tokenizer.json, as in SGLang and transformers 4",
    ),
    replace(
        _LLAMA2,
        name="e5-mistral",
        family="mistral",
        tokenizer=_names("LlamaTokenizer", add_bos_token=True, add_eos_token=True, **_SPM_NAMES),
        generation=(),
        fields={"architectures": ["MistralModel"]},
        behind=("</s>",),
        why=(
            "transformers 5 and what runs on it drop add_eos_token, and embeddings are wrong (mteb#5237); here it counts where "
            "nothing is generated, as in transformers 4"
        ),
    ),
]


def write_folder(folder: Path, shape: Shape) -> dict[str, int]:
    """Write all files but weights; return the ids of added tokens."""
    tokenizer = _tokenizer(shape.spelling)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in shape.special])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in shape.plain])
    ids = {text: tokenizer.token_to_id(text) for text in (*shape.special, *shape.plain)}
    if shape.post:
        named = [(text, ids[text]) for text in shape.post.split() if text != "$A"]
        template = processors.TemplateProcessing(single=shape.post, special_tokens=named)
        steps = [processors.ByteLevel(trim_offsets=False)] if shape.spelling == BYTES else []
        tokenizer.post_processor = processors.Sequence([*steps, template])
    elif shape.spelling == BYTES:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size() + shape.padding
    write_json(folder / "config.json", _config(shape, ids, size))
    write_json(folder / "tokenizer_config.json", shape.tokenizer)
    if shape.generation:
        write_json(folder / "generation_config.json", {"eos_token_id": _some(shape.generation, ids)})
    for name, content in shape.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return ids


def _config(shape: Shape, ids: dict[str, int], size: int) -> dict[str, Any]:
    seeing = {"llava": "llama", "qwen2_5_vl": "qwen2"}
    base = tiny_config(seeing.get(shape.family, shape.family))
    base |= {"vocab_size": size, "max_position_embeddings": TRAINED, "bos_token_id": None, "eos_token_id": None}
    base |= {
        "pad_token_id": None,
        **({"eos_token_id": _some(shape.config, ids)} if shape.config else {}),
        **shape.fields,
    }
    if shape.family == "llava":
        whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": base}
        return {**whole, "vision_config": {"model_type": "clip_vision_model"}, "image_token_index": ids["<image>"]}
    if shape.family == "qwen2_5_vl":
        named = {name: ids[f"<|{text}|>"] for name, text in _QWEN_IDS.items()}
        own = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
        return {**base, **own, "vision_config": _VISION, **named}
    return base


_QWEN_IDS = {
    "image_token_id": "image_pad",
    "video_token_id": "video_pad",
    "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
}


def _some(texts: Sequence[str], ids: dict[str, int]) -> int | list[int]:
    found = [ids[text] for text in texts]
    return found[0] if len(found) == 1 else found


def _tokenizer(spelling: str) -> Tokenizer:
    if spelling == BYTES:
        return _byte_level()
    words = [f"▁{word}" for word in WORDS]
    single = ["▁", *map(chr, range(0x21, 0x7F)), "\n", "é"]
    vocab = {token: id for id, token in enumerate([*_SPM, *(f"<0x{byte:02X}>" for byte in range(256)), *single])}
    tokenizer = Tokenizer(
        BPE(vocab, _merges(vocab, words), unk_token="<unk>", fuse_unk=True, byte_fallback=True, ignore_merges=False)
    )
    spaces = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spelling == LLAMA2:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    elif spelling == MISTRAL:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = spaces
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    stripped = [] if spelling == GEMMA else [decoders.Strip(content=" ", left=1)]
    tokenizer.decoder = decoders.Sequence([*parts, *stripped])
    return tokenizer


def _byte_level() -> Tokenizer:
    vocab = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, _merges(vocab, [f"Ġ{word}" for word in WORDS])))
    split = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(vocab: dict[str, int], words: Sequence[str]) -> list[tuple[str, str]]:
    """Letter by letter to each word; adds what they make to `vocab`."""
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return merges
