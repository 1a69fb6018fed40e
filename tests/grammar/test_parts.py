"""The parts with literals: masks on logits, the finish check, deferred sampling, bad grammars, tags."""

import json
import subprocess
import sys

import pytest
import torch

from engine.grammar.queue import Compiler
from engine.model_files.model_config import DEFAULT_MODEL_PATH
from engine.sampler.sampling import token_mask, unpacked_on_device
from engine.sampling_params import GrammarInvalid, GrammarSpec
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens
from tests.grammar.compilers import COMPILERS, accepts, check_texts, compiler_of, ids_of, in_mask
from tests.grammar.fixed import Fixed

CPU = torch.device("cpu")


def bits(*tokens: int, words: int = 2) -> bytes:
    mask = sum(1 << t for t in tokens)
    return mask.to_bytes(4 * words, "little")


def test_a_mask_leaves_other_rows_alone_and_allows_what_it_says() -> None:
    """V is no multiple of 32, and tokens 31, 32 lie on the border of two words (31 is the sign bit)."""
    logits = torch.arange(3 * 40, dtype=torch.float32).view(3, 40)
    mask = token_mask({0: bits(0, 31, 39), 2: bits(32)}, device=CPU)
    assert mask is not None
    masked = mask.apply(logits, fallback=logits)
    allowed = [{0, 31, 39}, set(range(40)), {32}]
    for row, tokens in enumerate(allowed):
        for t in range(40):
            assert masked[row, t] == (logits[row, t] if t in tokens else -torch.inf)
    assert logits.isfinite().all(), "the caller's logits are not touched"
    assert token_mask({}, device=CPU) is None


def test_a_gpu_unpacks_to_the_same() -> None:
    """The device's way, run here on the CPU, and numpy's."""
    logits = torch.zeros(1, 90)
    data = bytes(range(7, 19))
    mask = token_mask({0: data}, device=CPU)
    assert mask is not None
    expected = [data[t // 8] >> t % 8 & 1 == 1 for t in range(90)]
    assert unpacked_on_device(mask.bits, 90)[0].tolist() == expected
    assert mask.apply(logits, fallback=logits).isfinite()[0].tolist() == expected


def test_where_an_edit_banned_all_that_is_allowed_the_grammar_wins() -> None:
    logits = torch.zeros(2, 40)
    banned = logits.clone()
    banned[:, 5] = -torch.inf
    mask = token_mask({0: bits(5), 1: bits(5, 6)}, device=CPU)
    assert mask is not None
    masked = mask.apply(banned, fallback=logits)
    assert masked[0].isfinite().nonzero().flatten().tolist() == [5]
    assert masked[1].isfinite().nonzero().flatten().tolist() == [6]


def test_a_token_outside_the_grammar_is_an_error_of_its_request() -> None:
    engine = EngineInATest(depth=2)
    second = expected_tokens([1, 2, 3], 2)[1]
    engine.add("r", [1, 2, 3], max_new_tokens=20).grammar = Fixed(9, refuses=second)
    engine.add("plain", [4, 5], max_new_tokens=5)
    engine.run()
    finish = engine.finish["r"]
    assert (finish.kind, finish.status, finish.message) == (
        "abort",
        400,
        f"grammar: token {second} cannot stand at place 1",
    )
    assert engine.tokens["plain"] == expected_tokens([4, 5], 5)


@pytest.fixture(scope="module", params=COMPILERS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def compiler(backend: str) -> Compiler:
    return compiler_of(backend)


BAD = {
    "json": ("json_schema", "{nope"),
    "not-an-object": ("json_schema", '"abc"'),
    "type": ("json_schema", '{"type": "nope"}'),
    "remote": ("json_schema", '{"$ref": "http://example.org/schema"}'),
    "deep": ("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000),
    "open-group": ("regex", "(a"),
    "look-around": ("regex", "(?=a)b"),
    "deep-regex": ("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "unknown-rule": ("ebnf", "start: foo"),
    "no-grammar": ("ebnf", "hello world"),
    "deep-lark": ("ebnf", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "tag-json": ("structural_tag", "[]"),
    "tag-empty": ("structural_tag", '{"structures": [], "triggers": ["<"]}'),
    "tag-trigger": ("structural_tag", '{"structures": [{"begin": "<a>"}], "triggers": ["<b"]}'),
    "tag-schema": ("structural_tag", '{"structures": [{"begin": "<a>", "schema": {"type": "no"}}], "triggers": ["<"]}'),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_reported_in_one_line(name: str) -> None:
    with pytest.raises(GrammarInvalid) as error:
        compiler_of("llguidance").compile(GrammarSpec(*BAD[name]))
    assert str(error.value) and "\n" not in str(error.value) and len(str(error.value)) <= 300


def test_structural_tags_force_what_follows_a_trigger(compiler: Compiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f=x>", "schema": schema, "end": "</f>"}]}
    good = ("", "free < text", 'hi <f=x>{"a": 5}</f>', '<f=x>{"a":1}</f> and <f=x>{"a":2}</f>\n')
    bad = ("<f=y>", '<f=x>{"b": 5}</f>', "hi <f", '<f=x>{"a": 5}')
    check_texts(compiler, GrammarSpec("structural_tag", json.dumps(tag)), good=good, bad=bad)


def test_a_number_of_any_length_stands_in_a_tag(compiler: Compiler) -> None:
    structure = {"begin": "<c>f:", "after_number": "<a>", "schema": {"type": "integer"}, "end": "</c>"}
    spec = GrammarSpec("structural_tag", json.dumps({"triggers": ["<c>"], "structures": [structure]}))
    bad = ("<c>f:<a>5</c>", "<c>f:x<a>5</c>", "<c>f:1<b>5</c>", '<c>f:1<a>"x"</c>', "<c>g:1<a>5</c>")
    check_texts(compiler, spec, good=("", "hi <c>f:0<a>5</c>", "<c>f:0<a>5</c><c>f:12<a>6</c>"), bad=bad)


def test_special_tokens_stand_in_tags() -> None:
    compiler = compiler_of("llguidance", eos_ids=[257])
    for begin, trigger, ids in (("<s>!", "<s>", [256, *ids_of("!")]), ("!<s>", "!", [*ids_of("!"), 256])):
        structure = {"begin": begin, "schema": {"type": "integer"}, "end": "<s>."}
        spec = GrammarSpec("structural_tag", json.dumps({"triggers": [trigger], "structures": [structure]}))
        state = compiler.compile(spec)()
        for token in (*ids_of("ab"), *ids, *ids_of("42"), 256, *ids_of(".")):
            assert state.accept(token), state.problem
        wrong = compiler.compile(spec)()
        assert all(wrong.accept(token) for token in ids) and not wrong.accept(256)


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_schema", '{"type": "object"}', ["{}", '{"a": [1, null]}'], ["[]", "{", "x"]),
        ("regex", "a+b?", ["a", "aab"], ["b", "ab "]),
        ("ebnf", 'root ::= "a" | "(" root ")"', ["a", "((a))"], ["(a", "b"]),
        ("ebnf", 'start: "ü" /[0-9]/', ["ü7"], ["u7"]),
    ],
)
def test_what_a_grammar_accepts(compiler: Compiler, kind: str, source: str, good: list[str], bad: list[str]) -> None:
    check_texts(compiler, GrammarSpec(kind, source), good=good, bad=bad)


@pytest.fixture(scope="module")
def shipped() -> tuple[Compiler, Tokenizer]:
    """Of the shipped model: one token a word, an unknown token for all others."""
    tokenizer = load_tokenizer(DEFAULT_MODEL_PATH)
    return compiler_of("llguidance", tokenizer, vocab_size=528, eos_ids=[2]), tokenizer


def test_a_vocabulary_that_cannot_write_json_says_so(shipped: tuple[Compiler, Tokenizer]) -> None:
    with pytest.raises(GrammarInvalid, match="no token of the vocabulary can follow"):
        shipped[0].compile(GrammarSpec("json_schema", '{"type": "object"}'))


def test_forced_text_is_written_with_tokens_that_say_just_that(shipped: tuple[Compiler, Tokenizer]) -> None:
    compiler, tokenizer = shipped
    mask = compiler.compile(GrammarSpec("regex", " v9[0-9]"))().bitmask()
    words = [tokenizer.token_text(t) for t in in_mask(mask, 528)]
    assert words == [f" v9{i}" for i in range(10)]
    state = compiler.compile(GrammarSpec("ebnf", 'start: " v42 k03"'))()
    tokens = tokenizer.encode("v42 k03", add_special_tokens=False)
    for token in tokens:
        assert in_mask(state.bitmask(), 528) == [token]
        assert state.accept(token), state.problem
    assert state.ended
    dead_end = compiler.compile(GrammarSpec("regex", "( v[0-9]+Q)"))()
    dead_end.accept(tokens[0])
    assert any(dead_end.bitmask())  # a token comes, which the state refuses
    assert not dead_end.accept(2) and dead_end.problem == "no token of the vocabulary can follow" and not dead_end.ended


def test_whitespace_between_the_parts_of_json_is_a_choice(backend: str) -> None:
    spec = GrammarSpec("json_schema", '{"type": "object"}')
    dense = compiler_of(backend, any_whitespace=False)
    check_texts(dense, spec, good=['{"a":1}'], bad=['{"a": 1}'])


PARAMETERS = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
STRUCTURE = {"begin": "<f>", "schema": json.loads(PARAMETERS), "end": "</f>"}
TAG = json.dumps({"triggers": ["<f>"], "structures": [STRUCTURE]})
PLACES = {"schema": ("json_schema", PARAMETERS, "OBJECT"), "tag": ("structural_tag", TAG, "<f>OBJECT</f>")}


@pytest.mark.parametrize("place", PLACES)
def test_whitespace_in_a_row_is_bounded(backend: str, place: str) -> None:
    kind, source, text = PLACES[place]
    spec = GrammarSpec(kind, source)
    compiler = compiler_of(backend)
    most, more, lines = (text.replace("OBJECT", "{" + space + '"a": 1}') for space in (16 * " ", 17 * " ", "\n  "))
    check_texts(compiler, spec, good=[most, lines], bad=[more])


@pytest.mark.parametrize("place", PLACES)
def test_objects_are_closed_unless_their_schema_says_otherwise(backend: str, place: str) -> None:
    kind, source, text = PLACES[place]
    more = text.replace("OBJECT", '{"a": 1, "b": 2}')
    assert not accepts(compiler_of(backend), GrammarSpec(kind, source), more)
    says = source.replace('"required"', '"additionalProperties": true, "required"')
    assert accepts(compiler_of(backend), GrammarSpec(kind, says), more)


def test_the_queue_brings_no_library() -> None:
    """`tandem plan` has the loop, and with it the queue, without the engine's packages."""
    code = "import engine.grammar.queue, sys; print({'llguidance', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
