"""Reasoning in text and in tokens: the same whatever the chunks, and nothing lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.parts import PlainReader
from engine.text.reasoning import (
    HARMONY,
    REASONING_FORMATS,
    HarmonyReader,
    Opening,
    ReasoningFormat,
    ReasoningReader,
    ReasoningTokens,
    opening_of,
)
from engine.text.sample import ReasoningText, ToolCall, WholeAnswer
from engine.text.tool_calls import QWEN25, ToolCalls
from tests.text.chunks import read, same_of_all_splits, splits

THINK = ReasoningFormat()
OPEN, CLOSED, UNDECIDED = Opening.OPEN, Opening.CLOSED, Opening.UNDECIDED
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def answer(text: str, opening: Opening, *, streams: bool = True, interrupts: str = "") -> WholeAnswer:
    def make() -> ReasoningReader:
        after = ToolCalls(QWEN25, {"add": None}) if interrupts else PlainReader()
        return ReasoningReader(THINK, opening, after=after, streams=streams, interrupts=interrupts)

    return same_of_all_splits(make, text)


CASES = [
    ("<think>\nA b.\n</think>\n\nThe answer.\n", UNDECIDED, "A b.", "The answer.\n"),
    ("A b.\n</think>\n\nThe answer.", OPEN, "A b.", "The answer."),
    ("<think>A b.</think>The answer.", OPEN, "A b.", "The answer."),
    ("  <think>A</think>B", UNDECIDED, "A", "B"),
    ("<think>\n\n</think>\n\nB", UNDECIDED, "", "B"),
    ("No reasoning </think> here.", UNDECIDED, "", "No reasoning </think> here."),
    (" A <think>b</think>", UNDECIDED, "", " A <think>b</think>"),
    ("The answer.</think>", CLOSED, "", "The answer.</think>"),
    ("A, cut by length </thi", OPEN, "A, cut by length </thi", ""),
    ("<think>A </think", UNDECIDED, "A </think", ""),
    ("<thi", UNDECIDED, "", "<thi"),
    ("<thi", OPEN, "<thi", ""),
    ("A</think>B</think>C", OPEN, "A", "B</think>C"),
    ("", UNDECIDED, "", ""),
    (" \n", UNDECIDED, "", " \n"),
]


@pytest.mark.parametrize(("text", "opening", "reasoning", "content"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("streams", [True, False])
def test_reasoning_and_text(text: str, opening: Opening, reasoning: str, content: str, streams: bool) -> None:
    assert answer(text, opening, streams=streams) == WholeAnswer(reasoning, content)


def test_calls_follow_reasoning_and_may_end_it() -> None:
    called = [ToolCall("add", "", '{"a": 1}')]
    assert answer(f"A\n</think>\n\n{CALL}", OPEN, interrupts="<tool_call>") == WholeAnswer("A", "", called)
    assert answer(f"A\n{CALL}", OPEN, interrupts="<tool_call>") == WholeAnswer("A", "", called)
    assert answer(f"A {CALL}", OPEN) == WholeAnswer(f"A {CALL}", "")


def test_reasoning_streams_before_it_ends_unless_it_may_not() -> None:
    reader = ReasoningReader(THINK, OPEN, after=PlainReader())
    assert reader.feed("One two ") == [ReasoningText("One two")]
    assert reader.feed("three") == [ReasoningText(" three")]
    held = ReasoningReader(THINK, OPEN, after=PlainReader(), streams=False)
    assert held.feed("One two ") == held.feed("three") == []
    assert held.feed("</think>") == [ReasoningText("One two three")]


@given(
    st.lists(st.one_of(st.text(max_size=6), st.sampled_from(["<think>", "</think>", "\n", " ", CALL])), max_size=8),
    st.sampled_from([OPEN, CLOSED, UNDECIDED]),
    st.sampled_from(["", "<tool_call>"]),
)
def test_any_text_in_any_chunks(pieces: list[str], opening: Opening, interrupts: str) -> None:
    text = "".join(pieces)
    answer(text, opening, interrupts=interrupts)


@pytest.mark.parametrize(
    ("name", "prompt", "prefix", "opening"),
    [
        ("qwen3", "<|im_start|>assistant\n", "", UNDECIDED),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "", OPEN),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", CLOSED),
        ("qwen3", "<|im_start|>assistant\n", "The ", CLOSED),
        ("qwen3", "<|im_start|>assistant\n", "<think>Well", OPEN),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "Well</think> So", CLOSED),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "Well", OPEN),
        ("qwen3", "user: what is <think>?\n<|im_start|>assistant\n", "", UNDECIDED),
        ("deepseek-r1", "<｜Assistant｜>", "", OPEN),
        ("deepseek-v3", "<｜Assistant｜></think>", "", CLOSED),
        ("deepseek-v3", "<｜Assistant｜><think>", "", OPEN),
        ("glm45", "<|assistant|>\n<think></think>", "", CLOSED),
        ("gpt-oss", "<|start|>assistant", "", UNDECIDED),
        ("mistral", "[/INST]", "", UNDECIDED),
    ],
)
def test_what_a_prompt_says(name: str, prompt: str, prefix: str, opening: Opening) -> None:
    assert opening_of(REASONING_FORMATS[name], prompt, prefix=prefix) is opening


def _counter_of(tokens: list[bytes], start: str, *ends: str, opening: Opening = UNDECIDED) -> ReasoningTokens:
    return ReasoningTokens(start=start, ends=ends, opening=opening, token_bytes=tokens.__getitem__)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(
    ("text", "opening", "ends_at"),
    [
        ("<think>one two three</think>\n\nfour five", UNDECIDED, "<think>one two three</think>"),
        ("one two three</think>\n\nfour five", OPEN, "one two three</think>"),
        ("<think>one two three", UNDECIDED, "<think>one two three"),
        ("one two three</think>", UNDECIDED, ""),
        ("one two three</think>", CLOSED, ""),
        ("one two <tool_call>{}</think>", OPEN, "one two <tool_call>"),
    ],
)
def test_tokens_count_up_to_the_end_of_the_reasoning(seed: int, text: str, opening: Opening, ends_at: str) -> None:
    """The token that completes the end is the last one that counts."""
    *_, tokens = splits(text, seeds=seed + 1)
    starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    for chunk in (1, 3, len(tokens)):
        counter = _counter_of(
            [token.encode() for token in tokens], "<think>", "</think>", "<tool_call>", opening=opening
        )
        for at in range(0, len(tokens), chunk):
            counter.add(range(at, min(at + chunk, len(tokens))))
        assert counter.num == sum(start < len(ends_at) for start in starts)


THOUGHT = "<|channel|>analysis<|message|>"
HARMONY_TEXT = (
    f"{THOUGHT}Need add.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Let me add.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "arguments"),
    [
        (f"{THOUGHT}Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>!", "Hm.", "Hi <b>!", None),
        (HARMONY_TEXT, "Need add.", "Let me add.", '{"a": 1}'),
        (HARMONY_TEXT.removesuffix("}<|call|>"), "Need add.", "Let me add.", '{"a": 1}'),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>', "", "", '{"a": 2}'),
        ("<|channel|>final<|message|>Hi<|return|>", "", "Hi", None),
        (f"{THOUGHT}cut", "cut", "", None),
        ("plain text", "", "plain text", None),
        ("t", "", "t", None),
        ("<|channel|>anal", "", "", None),
    ],
)
@pytest.mark.parametrize("streams", [True, False])
def test_channels_of_harmony(text: str, reasoning: str, content: str, arguments: str | None, streams: bool) -> None:
    whole = same_of_all_splits(lambda: HarmonyReader(["add"], answer=PlainReader(), streams=streams), text)
    assert whole == WholeAnswer(reasoning, content, [] if arguments is None else [ToolCall("add", "", arguments)])


CALL_HEAD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("body", "text", "arguments"),
    [
        ('{"a": "x\ny"}<|call|>', "", r'{"a": "x\ny"}'),
        ("<|call|>", "", "{}"),
        ("null<|call|>", "", "{}"),
        (' {"a": 1} \n<|call|>', "", '{"a": 1}'),
        ('{"a": 1} so <|call|>', " so ", '{"a": 1}'),
        ('{"a": 1, b: 2} <|call|>', ", b: 2} ", '{"a": 1}'),
        ('{"a": "b', "", '{"a": "b"}'),
        ("[1] <|call|>", CALL_HEAD + "[1] ", None),
        ("nope <|call|>", CALL_HEAD + "nope ", None),
        ("null so <|call|>", CALL_HEAD + "null so ", None),
        ("", CALL_HEAD, None),
    ],
)
def test_arguments_of_harmony_are_an_object_or_there_is_no_call(body: str, text: str, arguments: str | None) -> None:
    whole = same_of_all_splits(lambda: HarmonyReader(["add"], answer=PlainReader()), CALL_HEAD + body)
    assert whole == WholeAnswer("", text, [] if arguments is None else [ToolCall("add", "", arguments)])


def test_an_unknown_function_of_harmony_is_no_call() -> None:
    text = "<|channel|>commentary to=functions.rm <|message|>{}"
    assert read(HarmonyReader(["add"], answer=PlainReader()), [f"{text}<|call|>"]) == WholeAnswer("", text)


def test_tokens_of_harmony_count_its_analysis() -> None:
    tokens = [b"<|channel|>", b"analysis", b"<|message|>", b"Hm", b"<|end|>", b"<|start|>", b"assistant"]
    counter = _counter_of(tokens, HARMONY.start, HARMONY.end)
    counter.add(range(len(tokens)))
    assert counter.num == 5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_marker_is_known_where_tokens_hold_parts_of_its_characters(size: int) -> None:
    format = REASONING_FORMATS["kimi"]
    text = f"{format.start}hm{format.end}yes".encode()
    tokens = [text[at : at + size] for at in range(0, len(text), size)]
    counter = _counter_of(tokens, format.start, format.end)
    counter.add(range(len(tokens)))
    assert counter.num == -(-len(f"{format.start}hm{format.end}".encode()) // size) and counter.opening is CLOSED
