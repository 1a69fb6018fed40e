"""Incremental parser of tool calls; chunks do not matter.

TEXT --marker--> OPEN --opener--> CALL (scanner) --end--> AFTER --separator, opener--> OPEN
                                                           \\--closer, or anything else--> TEXT

Text that only looks like a call (no name, unknown function, arguments not an object) stays text. A
call may be sent before it ends: a format error closes it, and the rest is text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.text.json_call import HeadedCall, JsonCall, PythonCall
from engine.text.parts import CallScanner, split_at
from engine.text.sample import Arguments, CallBegins, Part, PlainText
from engine.text.tagged_call import GLM_TAGS, QWEN_TAGS, Schemas, TaggedCall

Scan = Callable[[Schemas, str], CallScanner]  # of the functions' schemas and the call's first text


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    r"""How a model writes calls as JSON.

    `marker`: text before calls. `bare`: text that starts with it is calls. `bracket`: optional.
    `opener`: starts a call. `separator`: between calls, empty if the opener suffices. `fillers`:
    allowed after a call. `closer`: after the last. `begin`, `after_number`, `end`: the structural
    tag with NAME for the function's; empty if strict schemas are unsupported.

    qwen25       text <tool_call>\n{...}\n</tool_call>\n<tool_call>...      (Qwen 2.5 and 3, Hermes)
    llama3       {...}; {...}      or  text <|python_tag|>{...}; {...}        (Llama 3.1, 3.2, 3.3)
    mistral      text [TOOL_CALLS] [{...}, {...}]  or  [TOOL_CALLS]NAME[ARGS]{...}
    pythonic     [NAME(key=value), NAME()]
    llama4       the same, or  text <|python_start|>[...]<|python_end|>
    deepseekv3, deepseekv31, kimi_k2: a section of calls, the name before the arguments
    glm45, qwen3_coder: <tool_call> with a tag for each argument (tagged_call.py)
    array        [{...}, {...}]                                      (a forced call, any model)
    """

    scanner: Scan = lambda schemas, text: JsonCall()
    marker: str = ""
    bare: str = ""
    bracket: str = ""
    opener: str = "{"
    separator: str = ""
    fillers: tuple[str, ...] = ()
    closer: str = ""
    begin: str = ""
    after_number: str = ""
    end: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marker and unambiguous opener; models may omit the marker."""
        return tuple(mark for mark in (self.marker, self.opener if len(self.opener) > 1 else "") if mark)


def _headed(pattern: str) -> Scan:
    header = re.compile(pattern, re.DOTALL)
    return lambda schemas, text: HeadedCall(header)


def _mistral(schemas: Schemas, text: str) -> CallScanner:
    """Either Mistral format, by the first character."""
    return JsonCall() if text.startswith("{") else HeadedCall(_MISTRAL_HEADER)


_MISTRAL_HEADER = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]\s*")

QWEN25 = CallFormat(
    marker="<tool_call>",
    closer="</tool_call>",
    begin='<tool_call>\n{"name": "NAME", "arguments": ',
    end="}\n</tool_call>",
)
LLAMA3 = CallFormat(
    marker="<|python_tag|>",
    bare="{",
    separator=";",
    begin='<|python_tag|>{"name": "NAME", "parameters": ',
    end="}",
)
MISTRAL = CallFormat(
    scanner=_mistral,
    marker="[TOOL_CALLS]",
    bracket="[",
    opener="",
    separator=",",
    closer="]",
    begin='[TOOL_CALLS] [{"name": "NAME", "arguments": ',
    end="}]",
)
PYTHONIC = CallFormat(
    scanner=lambda schemas, text: PythonCall(), bare="[", bracket="[", opener="", separator=",", closer="]"
)
LLAMA4 = CallFormat(
    scanner=lambda schemas, text: PythonCall(),
    marker="<|python_start|>",
    bare="[",
    bracket="[",
    opener="",
    separator=",",
    fillers=("]",),
    closer="<|python_end|>",
)
DEEPSEEK_V3 = CallFormat(
    scanner=_headed(r"<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\s*"),
    marker="<｜tool▁calls▁begin｜>",
    opener="<｜tool▁call▁begin｜>",
    fillers=("```", "<｜tool▁call▁end｜>"),
    closer="<｜tool▁calls▁end｜>",
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
)
DEEPSEEK_V31 = CallFormat(
    scanner=_headed(r"<｜tool▁call▁begin｜>\s*(?P<name>[^\n]+?)<｜tool▁sep｜>\s*"),
    marker="<｜tool▁calls▁begin｜>",
    opener="<｜tool▁call▁begin｜>",
    fillers=("<｜tool▁call▁end｜>",),
    closer="<｜tool▁calls▁end｜>",
    begin="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
KIMI_K2 = CallFormat(
    scanner=_headed(
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>\s*"
    ),
    marker="<|tool_calls_section_begin|>",
    opener="<|tool_call_begin|>",
    fillers=("<|tool_call_end|>",),
    closer="<|tool_calls_section_end|>",
    begin="<|tool_call_begin|>functions.NAME:",
    after_number="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
)
GLM45 = CallFormat(scanner=lambda schemas, text: TaggedCall(GLM_TAGS, schemas), marker="<tool_call>", opener="")
QWEN3_CODER = CallFormat(
    scanner=lambda schemas, text: TaggedCall(QWEN_TAGS, schemas),
    marker="<tool_call>",
    opener="<function=",
    closer="</tool_call>",
)
ARRAY = CallFormat(bare="[", bracket="[", separator=",", closer="]")
CALL_FORMATS = {
    "deepseekv3": DEEPSEEK_V3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "deepseek_v31": DEEPSEEK_V31,
    "glm": GLM45,
    "glm45": GLM45,
    "glm47": GLM45,
    "hermes": QWEN25,
    "kimi_k2": KIMI_K2,
    "llama3": LLAMA3,
    "llama3_json": LLAMA3,
    "llama4": LLAMA4,
    "llama4_pythonic": LLAMA4,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen": QWEN25,
    "qwen25": QWEN25,
    "qwen3_coder": QWEN3_CODER,
}


class ToolCalls:
    """`functions`: allowed ones, with schemas."""

    def __init__(self, format: CallFormat, functions: Schemas) -> None:
        self._format = format
        self._functions = functions
        self._follows = _follows(format)
        self._stage: Callable[[ToolCalls], bool] = ToolCalls._read_text
        self._buffer = ""  # not read yet
        self._raw = ""  # read since the text ended, in case it is text after all
        self._space: list[str] = []  # after the text so far; given out if text follows
        self._at_start = True
        self._may_bracket = False  # the optional bracket may follow
        self._scanner: CallScanner = JsonCall()  # of the current call
        self._begun = False  # `CallBegins` was sent for the current call
        self._parts: list[Part] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        while self._buffer and self._stage(self):
            pass
        return self._taken()

    def end(self) -> list[Part]:
        if self._stage is ToolCalls._read_call:
            self._scanner.end()
            self._show_call()
        if not self._begun:
            self._emit(self._raw + self._buffer)
        if not self.num_calls and (space := "".join(self._space)):
            self._parts.append(PlainText(space))
        self._buffer = self._raw = ""
        return self._taken()

    # ---- stages: each reads the buffer and returns whether to continue

    def _read_text(self) -> bool:
        if self._at_start and self._format.bare:
            rest = self._buffer.lstrip()
            if not rest:
                return False
            self._at_start = False
            if rest.startswith(self._format.bare):
                self._begin("", self._buffer[: len(self._buffer) - len(rest)], rest)
                return True
        text, mark, rest = split_at(self._buffer, self._format.marks)
        if not mark:
            self._emit(text)
            self._buffer = rest
        elif mark == self._format.marker:
            self._begin(text, mark, rest)
        else:
            self._begin(text, "", mark + rest)
        return bool(mark)

    def _begin(self, text: str, raw: str, rest: str) -> None:
        self._emit(text)
        self._raw, self._buffer = raw, rest
        self._may_bracket = bool(self._format.bracket)
        self._enter(ToolCalls._read_open)

    def _read_open(self) -> bool:
        if self._skip_space():
            return False
        if self._may_bracket and self._buffer.startswith(self._format.bracket):
            self._may_bracket = False
            self._move(len(self._format.bracket))
        elif self._buffer.startswith(self._format.opener):
            self._scanner = self._format.scanner(self._functions, self._buffer)
            self._enter(ToolCalls._read_call)
        elif self._format.opener.startswith(self._buffer):
            return False
        else:
            self._finish_call(0, ToolCalls._read_text)
        return True

    def _read_call(self) -> bool:
        scanner = self._scanner
        self._move(scanner.feed(self._buffer))
        self._show_call()
        if scanner.broken:
            self._finish_call(0 if self._raw else 1, ToolCalls._read_text)  # else it would find the same opener again
        elif scanner.done:
            self._stage = ToolCalls._read_after
        return bool(self._buffer)

    def _read_after(self) -> bool:
        if self._skip_space():
            return False
        marker = next((m for m in self._follows if self._buffer.startswith(m)), None)
        if marker is not None:
            self._follows[marker](self, marker)
        elif any(m.startswith(self._buffer) for m in self._follows):
            return False
        else:
            self._finish_call(0, ToolCalls._read_text)
        return True

    # ---- moves

    def _show_call(self) -> None:
        scanner = self._scanner
        if scanner.name in self._functions and not self._begun:
            self._begun = True
            assert scanner.name is not None
            self._parts.append(CallBegins(self.num_calls, scanner.name, scanner.id))
            self.num_calls += 1
        if self._begun and (new := scanner.new_arguments()):
            self._parts.append(Arguments(self.num_calls - 1, new))

    def _finish_call(self, length: int, stage: "Callable[[ToolCalls], bool]") -> None:
        self._move(length)
        if not self._begun:
            self._emit(self._raw)
        self._raw = ""
        self._enter(stage)

    def _enter(self, stage: "Callable[[ToolCalls], bool]") -> None:
        self._stage, self._begun = stage, False

    def _next_call(self, marker: str) -> None:
        self._finish_call(len(marker) if marker == self._format.separator else 0, ToolCalls._read_open)

    def _close(self, marker: str) -> None:
        self._finish_call(len(marker), ToolCalls._read_text)

    def _fill(self, marker: str) -> None:
        self._move(len(marker))

    def _move(self, length: int) -> None:
        """Mark as read; negative: as unread."""
        at = len(self._raw) + length
        text = self._raw + self._buffer
        self._raw, self._buffer = text[:at], text[at:]

    def _skip_space(self) -> bool:
        self._move(len(self._buffer) - len(self._buffer.lstrip()))
        return not self._buffer

    def _emit(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._parts.append(PlainText("".join((*self._space, kept))))
            self._space.clear()
        self._space.append(text[len(kept) :])

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


def _follows(format: CallFormat) -> dict[str, Callable[[ToolCalls, str], None]]:
    opens = format.separator or (format.opener if len(format.opener) > 1 else "")
    found = dict.fromkeys(format.fillers, ToolCalls._fill) | {
        format.closer: ToolCalls._close,
        opens: ToolCalls._next_call,
    }
    return {marker: follow for marker, follow in found.items() if marker}
