"""Tokenizers of GGUF files: the ids of transformers on 300 texts, special tokens, and the text that comes back."""

import json
from functools import cache
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from engine.gguf.file import end_ids, open_gguf
from engine.gguf.tokenizer import PRE_TOKENIZERS
from engine.model_files.directory import open_directory
from engine.model_files.hub import smollm2_file
from engine.text.chat_template import load_chat_template
from engine.text.tokenizer import Tokenizer as OurTokenizer
from engine.text.tokenizer import load_tokenizer
from tests.models.files.folder_shapes import TINYLLAMA, write_folder
from tests.models.files.gguf_file import add_tokenizer, write
from tests.models.files.varied_texts import varied_texts

DOCS = Path(__file__).parents[3] / "docs"
SPECIAL = ("<|begin|>", "<|im_start|>", "<|im_end|>")
TOOL = "<tool_call>"  # an added token that is not special

# As the tokenizer.json files of these families say it (SmolLM2's, Llama 3's; Qwen2's is transformers' own class).
DIGITS_FIRST = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def corpus() -> list[str]:
    return [page.read_text() for page in sorted(DOCS.glob("*.md"))] + varied_texts(500, special=(), seed=1)


def trained(pre: str) -> Tokenizer:
    """A small byte-level BPE, trained on text that was cut as `pre` says."""
    tokenizer = Tokenizer(models.BPE())
    if pre in ("llama-bpe", "qwen2"):
        pattern = LLAMA3 if pre == "llama-bpe" else LLAMA3.replace("{1,3}", "")
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(DIGITS_FIRST)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(TOOL, normalized=False, special=False)])
    return tokenizer


def write_byte_level(file: Path, tokenizer: Tokenizer, pre: str) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    add_tokenizer(writer, json.loads(tokenizer.to_str()), pre=pre)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    write(writer)


def assert_same_ids(ours: OurTokenizer, theirs: PreTrainedTokenizerFast, special: tuple[str, ...]) -> None:
    for text in varied_texts(300, special=special):
        for add in (True, False):
            ids, expected = (t.encode(text, add_special_tokens=add) for t in (ours, theirs))
            if add and text.startswith("<s>") and expected[:2] == [1, 1]:
                expected = expected[1:]  # a text that brings its BOS gets no second one here
            assert ids == expected, repr(text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(text)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_ids_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    tokenizer = trained(pre)
    write_byte_level(tmp_path / "model.gguf", tokenizer, pre)
    if pre == "qwen2":  # the class has the NFC step, transformers' reading of GGUF files has not
        model = json.loads(tokenizer.to_str())["model"]
        names = {"unk_token": SPECIAL[0], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
        theirs = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], **names)
        theirs.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL], special_tokens=True)
        theirs.add_tokens([AddedToken(TOOL, normalized=False, special=False)])
    elif pre == "smollm":  # transformers' reading of GGUF files does not know it
        theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    else:
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = load_tokenizer(tmp_path / "model.gguf")
    adds_bos = pre == "llama-bpe"  # llama.cpp's rule where the file does not say; transformers adds none then
    assert_same_ids(OurTokenizer(ours.backend), theirs, (*SPECIAL, TOOL))
    ours = load_tokenizer(tmp_path / "model.gguf")
    assert ours.encode("Hi")[:1] == [0] if adds_bos else ours.encode("Hi")[:1] != [0]
    assert ours.special_ids == {0, 1, 2}
    assert ours.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(("prefix", "bos"), [(None, None), (True, True), (None, False)])
def test_sentencepiece_ids_are_those_of_transformers(prefix: bool | None, bos: bool | None, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_sentencepiece(file, prefix=prefix, bos=bos)
    ours, theirs = load_tokenizer(file), AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    # Each text between special tokens begins with a space, for llama.cpp and in the tokenizer.json of Llama 2 and TinyLlama; transformers'
    # reading of GGUF files has it at the beginning alone.
    theirs.backend_tokenizer.pre_tokenizer = None
    theirs.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    assert_same_ids(ours, theirs, ("<s>", "</s>", "<|im_start|>"))
    assert ours.token_bytes(ours.backend.token_to_id("<0xE2>")) == b"\xe2"


def test_sentencepiece_without_a_space_prefix(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "model.gguf", prefix=False, bos=False)
    ours = load_tokenizer(tmp_path / "model.gguf")
    for text in ("the capital", " the capital", "  two", "\nnew"):
        assert ours.decode(ours.encode(text)) == text


def write_sentencepiece(file: Path, *, prefix: bool | None, bos: bool | None) -> None:
    """Tokens with scores, as SentencePiece's BPE numbers them: -0 for the first merge, -1 for the second."""
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, limit_alphabet=200)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    learned = ["".join(pair) for pair in model["merges"]]
    single = [token for token in sorted(model["vocab"], key=model["vocab"].get) if len(token) == 1]
    control, bytes_ = ["<unk>", "<s>", "</s>", "<|im_start|>"], [f"<0x{b:02X}>" for b in range(256)]
    tokens = [*control, *bytes_, *learned, *single]
    scores = [0.0] * (len(control) + 256) + [-float(i) for i in range(len(learned) + len(single))]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3, 3] + [6] * 256 + [1] * (len(learned) + len(single)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    if bos is not None:
        writer.add_add_bos_token(bos)
    write(writer)


def test_a_gguf_file_of_tinyllama_reads_as_its_folder(tmp_path: Path) -> None:
    """Ids, what stands before and behind, and named templates are those of the files that it was made from."""
    write_folder(tmp_path / "model", TINYLLAMA)
    file = tmp_path / "model.gguf"
    model = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].get)
    learned = ["".join(pair) for pair in model["model"]["merges"]]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(learned.index(token)) if token in learned else -1e4 for token in tokens])
    writer.add_token_types([2, 3, 3, *(6 if len(t) == 6 and t.startswith("<0x") else 1 for t in tokens[3:])])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_eos_token(True)
    writer.add_chat_template([{"name": name, "template": name} for name in ("default", "tool_use", "rag")])
    write(writer)
    ours, theirs = load_tokenizer(file), PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    assert theirs.encode("a")[:1] == [1]
    for text in ("hello world", " the", "<s>hello", "hello</s>user hi</s>\nthe  tool", "<unk>user", "鬱", ""):
        plain = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == plain, text
        assert ours.encode(text) == [*([] if plain[:1] == [1] else [1]), *plain, 2], text
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True), text
    folder = open_directory(file)
    assert (folder.template(tools=False), folder.template(tools=True)) == ("default", "tool_use")
    assert end_ids(open_gguf(file)) == [2, 2]


QWEN_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "x")


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        (("<|end|>", "<end_of_turn>", "<|eot_id|>", "x", "y"), {"eos": 3}, "<|end|> <end_of_turn> <|eot_id|> x"),
        (("</s>", "<|im_end|>", "x", "y"), {"eot": 2, "eom": 3}, "</s> <|im_end|> x y"),
        (QWEN_TOKENS, {}, "<|endoftext|> <|im_end|> <|fim_pad|> <|repo_name|> <|file_sep|>"),
        (QWEN_TOKENS, {"fim_pad": 5}, "<|endoftext|> <|im_end|> <|repo_name|> <|file_sep|> x"),
        (("<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"), {}, "<|return|> <|call|> <|endoftext|>"),
        (("<|tool_response>", "</s>", "<turn|>"), {}, "<|tool_response> <turn|>"),
    ],
)
def test_ends_are_those_of_llama_cpp(tokens: tuple[str, ...], named: dict[str, int], ends: str, tmp_path: Path) -> None:
    """Whatever type the file gives them, as llama-vocab.cpp has them."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(tokens)
    for name, id in named.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
    write(writer)
    assert {tokens[id] for id in end_ids(open_gguf(tmp_path / "model.gguf"))} == set(ends.split())


def test_every_name_that_is_supported_is_tried_here() -> None:
    """Names for one way to cut text stand beside one that is tried above."""
    names = "default gpt-2 smollm llama-bpe llama3 llama-v3 qwen2 deepseek-r1-qwen"
    assert set(PRE_TOKENIZERS) == set(names.split())


@pytest.fixture(scope="module")
def smollm2() -> OurTokenizer:
    return load_tokenizer(smollm2_file())


def test_smollm2_ids_are_those_of_transformers(smollm2: OurTokenizer) -> None:
    """transformers' reading of the file, with the cutting that SmolLM2's tokenizer.json has and transformers leaves out.

    Its tokenizer.json is in no package, so the files themselves are not compared here.
    """
    _, fields, _ = get_gguf_tokenizer(str(smollm2_file()))
    backend, _ = convert_gguf_tokenizer("llama", fields)
    backend.pre_tokenizer = pre_tokenizers.Sequence(DIGITS_FIRST)
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<jupyter_code>")
    assert_same_ids(smollm2, PreTrainedTokenizerFast(tokenizer_object=backend), special)


def test_smollm2_has_its_special_tokens_and_template(smollm2: OurTokenizer) -> None:
    template = load_chat_template(smollm2_file(), special_tokens=smollm2.special_tokens)
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi 2026"}])
    assert text.endswith("<|im_start|>user\nHi 2026<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode(text)
    assert [i for i in ids if i in smollm2.special_ids] == [1, 2, 1, 2, 1]
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert len(smollm2.special_ids) == 17 and smollm2.vocab_size == 49152
