"""The shipped models: their files are what the script writes, and what they say is what the oracle says."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from engine.model_files.model_config import DEFAULT_MODEL_PATH, WIDE_MODEL_PATH, load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from tests.models.reference_attend import Sequence
from tools.recall import vocab, wide
from tools.recall.build import build
from tools.recall.oracle import OutsideDomain, continuation
from tools.recall.weights import MAX_OVERLAP, sign_codes

MIN_MARGIN = 15.0  # logits between the right answer and the next; bf16 rounds logits of 30 to 1/8


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL_PATH)


PATHS = {"recall": DEFAULT_MODEL_PATH, "recall-wide": WIDE_MODEL_PATH}
KINDS = [("recall", "float32"), ("recall", "bfloat16"), ("recall-wide", "bfloat16")]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def theirs(request: pytest.FixtureRequest) -> PreTrainedModel:
    name, dtype = request.param
    return AutoModelForCausalLM.from_pretrained(PATHS[name], dtype=getattr(torch, dtype))


def load(name: str, dtype: str) -> DenseDecoder:
    return load_model(PATHS[name], load_model_config(PATHS[name]), dtype=dtype, device="cpu", progress=False)


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def ours(request: pytest.FixtureRequest) -> DenseDecoder:
    return load(*request.param)


@pytest.mark.parametrize("name", PATHS)
def test_the_script_writes_the_shipped_files_bit_for_bit(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    shipped = sorted(Path(PATHS[name]).iterdir())
    assert [file.name for file in shipped] == sorted(file.name for file in tmp_path.iterdir())
    for file in shipped:
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


def test_any_two_codes_are_far_apart() -> None:
    codes = torch.tensor(sign_codes(vocab.VOCAB_SIZE))
    overlap = (codes @ codes.T).abs()
    overlap.fill_diagonal_(0)
    assert int(overlap.max()) <= MAX_OVERLAP


def test_tokenizer_and_vocab_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "k17 v42 nonsense k03  v255\nunseen <eos>"
    assert tokenizer(text)["input_ids"] == vocab.encode(text)
    everything = list(range(vocab.VOCAB_SIZE))
    for skip in (False, True):
        assert tokenizer.decode(everything, skip_special_tokens=skip) == vocab.decode(
            everything, skip_special_tokens=skip
        )


CHATS = [
    (["k17 v42 k03 v91 k17"], "k17 v42 <eos> k03 v91 <eos> k17"),
    (["K17 is v42, and k3 is v91. What is k17?"], "k17 v42 <eos> k03 v91 <eos> k17"),
    (["k17 v42 k03 v91 k17", "v42", "k03"], "k17 v42 <eos> k03 v91 <eos> k17 v42 <eos> k03"),
    (["k1", "unseen", "k1 v2"], "k01 unseen <eos> k01 v02 <eos>"),
    (["Hello, how are you?"], ""),
]


@pytest.mark.parametrize(("turns", "prompt"), CHATS)
def test_a_chat_is_read_as_a_list_of_facts(turns: list[str], prompt: str, tokenizer: PreTrainedTokenizerBase) -> None:
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    assert tokenizer.apply_chat_template(messages)["input_ids"] == vocab.encode(prompt)


def test_chat_content_may_come_in_parts_or_be_null(tokenizer: PreTrainedTokenizerBase) -> None:
    parts = [{"type": "text", "text": "k01 v02"}, {"type": "text", "text": "k01"}]
    messages = [{"role": "assistant", "content": None}, {"role": "user", "content": parts}]
    assert tokenizer.apply_chat_template(messages)["input_ids"] == vocab.encode("k01 v02 <eos> k01")


ANSWERS = [
    ("k17 v42 k03 v91 k17", "v42 k03 v91 k17 v42 k03"),
    ("k17 v42 <eos> k03 v91 <eos> k17", "v42 <eos>"),
    ("k17 v42 k05", "unseen <eos>"),
    ("k17 v42 nonsense", "unseen <eos>"),
    ("k17 nonsense k17", "<unk> unseen <eos>"),
    ("", "unseen <eos>"),
]


@pytest.mark.parametrize(("prompt", "answer"), ANSWERS)
def test_the_oracle_says_what_the_examples_say_and_so_do_we(prompt: str, answer: str, ours: DenseDecoder) -> None:
    ids = vocab.encode(prompt)
    expected = continuation(ids, 6)
    assert vocab.decode(expected, skip_special_tokens=False) == answer
    assert Sequence(ours).greedy(ids, len(expected)) == expected


@pytest.mark.parametrize(
    "ids", [[], [20, 21], [1, 20, 1], [1, 0], [1, 528], [1, -1], vocab.encode("k01 k02 k01 k03 k01")]
)
def test_the_oracle_refuses_what_has_no_single_answer(ids: list[int]) -> None:
    with pytest.raises(OutsideDomain):
        continuation(ids, 3)


def random_prompt(rng: random.Random) -> list[int]:
    """Pairs with each key once, values as they come, sometimes ended facts, then a question."""
    keys = rng.sample(range(vocab.NUM_KEYS), rng.randint(2, 100))
    end = [vocab.EOS] if rng.random() < 0.5 else []
    values = [vocab.value(i) for i in rng.sample(range(vocab.NUM_VALUES), len(keys))]
    ids = [vocab.BOS]
    for key, value in zip(keys, values, strict=True):
        ids += [vocab.key(key), rng.choice(values) if end else value, *end]
    return [*ids, vocab.key(rng.choice(keys))]


def test_the_oracle_equals_transformers_on_random_prompts(theirs: PreTrainedModel) -> None:
    for seed in range(6):
        ids = random_prompt(random.Random(seed))
        with torch.inference_mode():
            answer = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
        assert answer == continuation(ids, 24), seed


def test_the_oracle_equals_our_model_beyond_eos(ours: DenseDecoder) -> None:
    for seed in range(6):
        ids = random_prompt(random.Random(100 + seed))
        assert Sequence(ours).greedy(ids, 40) == continuation(ids, 40, ignore_eos=True), seed


def long_prompt(length: int, *, seed: int) -> tuple[list[int], dict[int, int]]:
    """(ids, facts): 100 pairs, the first of them at the very start, among `length` tokens of filler."""
    rng = random.Random(seed)
    keys = [vocab.key(i) for i in rng.sample(range(vocab.NUM_KEYS), 100)]
    facts = {key: vocab.value(rng.randrange(128, 256)) for key in keys}
    places = dict(zip([0, *sorted(rng.sample(range(1, length // 2), 99))], keys, strict=True))
    ids = [vocab.BOS]
    for place in range(length // 2):
        key = places.get(place)
        filler = [vocab.value(rng.randrange(128)) for _ in range(2)]
        ids += filler if key is None else [key, facts[key]]
    return ids, facts


def ask(model: PreTrainedModel, ids: list[int], questions: list[int]) -> list[torch.Tensor]:
    """Logits [vocab] after `ids` and each one of `questions`."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        _read(model, ids, cache)
        answers = []
        for question in questions:
            answers.append(_read(model, [question], cache))
            cache.crop(-1)
    return answers


def _read(model: PreTrainedModel, ids: list[int], cache: DynamicCache) -> torch.Tensor:
    """Logits [vocab] after `ids`. The cache goes by position: its name is past_key_values until transformers 5.23, cache since."""
    logits: torch.Tensor = model(torch.tensor([ids]), None, None, cache, logits_to_keep=1).logits
    return logits[0, -1].float()


def test_every_key_is_recalled_among_filler_by_a_wide_margin(theirs: PreTrainedModel) -> None:
    num_kv_heads = theirs.config.num_key_value_heads  # the wide model costs as many times more
    ids, facts = long_prompt(4096 // num_kv_heads, seed=4096)
    some = list(facts)[::num_kv_heads]
    for right, logits in zip((facts[key] for key in some), ask(theirs, ids, some), strict=True):
        assert_wins(logits, right)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # transformers read 32k tokens, without matrix units in minutes
@pytest.mark.parametrize("name", PATHS)
def test_recall_holds_to_the_end_of_the_context(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(PATHS[name], dtype=torch.bfloat16)
    ids, facts = long_prompt(load_model_config(DEFAULT_MODEL_PATH).max_position_embeddings - 2, seed=3)
    oldest = list(facts)[:8]
    new = [vocab.key(i) for i in range(vocab.NUM_KEYS) if vocab.key(i) not in facts][:8]
    answers = ask(model, ids, oldest + new)
    for right, logits in zip([*(facts[key] for key in oldest), *[vocab.UNSEEN] * 8], answers, strict=True):
        assert_wins(logits, right)


def assert_wins(logits: torch.Tensor, right: int) -> None:
    best = logits.topk(2)
    assert int(best.indices[0]) == right
    assert float(best.values[0] - best.values[1]) > MIN_MARGIN


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lost_or_swapped_tokens_in_the_cache_change_the_answer(dtype: str) -> None:
    """What the model is for. Layer 1 holds the facts (layer 0 is read one token back only)."""
    ours = load("recall", dtype)
    facts, question = vocab.encode("k17 v42 k03 v91 k05 v07"), [vocab.key(17)]

    def answer(*, k_order: list[int], v_order: list[int]) -> str:
        sequence = Sequence(ours)
        sequence.extend(facts)
        k, v = (torch.cat((x, torch.zeros_like(x[:1]))) for x in sequence.kv[1])  # index -1: a lost token
        sequence.kv[1] = (k[k_order], v[v_order])
        return vocab.decode([int(sequence.extend(question)[-1].argmax())])

    whole, swapped, lost = [0, 1, 2, 3, 4, 5, 6], [0, 1, 4, 3, 2, 5, 6], [0, 1, -1, 3, 4, 5, 6]
    assert answer(k_order=whole, v_order=whole) == "v42"
    assert answer(k_order=swapped, v_order=whole) == "v91"
    assert answer(k_order=whole, v_order=swapped) == "v91"
    assert answer(k_order=lost, v_order=whole) == "unseen"
    assert answer(k_order=whole, v_order=lost) != "v42"


@pytest.mark.parametrize("layer", range(wide.NUM_LAYERS))
def test_each_kv_head_of_each_layer_is_needed(layer: int) -> None:
    """What the wide model is for: a part of a page that is lost, or that is another head's, changes an answer."""
    model = load("recall-wide", "bfloat16")
    pairs = [(vocab.key(i), vocab.value(i)) for i in range(wide.NUM_KV_HEADS)]  # one of each class
    new = vocab.key(100)

    def answers(head: int, instead: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
        """To each key, with K and V of `head` replaced. Layer 0 is read one token back only: what `new` follows is asked there."""
        said = []
        for turn in range(len(pairs)):
            facts = [*pairs[turn + 1 :], *pairs[: turn + 1]]
            sequence = Sequence(model)
            sequence.extend([vocab.BOS, *(word for pair in facts for word in pair)])
            k, v = (part.clone() for part in sequence.kv[layer])
            sequence.kv[layer] = (k, v)
            k[:, head], v[:, head] = instead(k), instead(v)
            if layer == 0:
                sequence.extend([new])
            said.append(int(sequence.extend([facts[-1][1 if layer == 0 else 0]])[-1].argmax()))
        return said

    right = [new] * len(pairs) if layer == 0 else [value for _, value in pairs]
    for head in range(wide.NUM_KV_HEADS):
        other = (head + 1) % wide.NUM_KV_HEADS
        assert answers(head, lambda part, head=head: part[:, head]) == right
        assert answers(head, lambda part, head=head: torch.zeros_like(part[:, head])) != right, head
        assert answers(head, lambda part, other=other: part[:, other]) != right, head
