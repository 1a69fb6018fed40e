"""Right JSON whose fields are wrong, and the field that the error must name: `test_every_door.py` plays it."""

import json
from typing import Any

from tests.frontend.conftest import CONTEXT
from tests.hostile import table
from tests.hostile.table import CHAT, COMPLETE, GENERATE, RESPOND
from tests.hostile.wrong_responses import WRONG

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
NO_PARAMETERS: dict[str, Any] = {"function": {"name": "f", "parameters": []}}
BY_SCHEMA = {"type": "json_schema"}
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
USER = [{"role": "user", "content": "x"}]
_SPACED = {"regex": "a", "whitespace_pattern": " "}

# (path, fields, the field to name), for the worker of tests/frontend: its tokenizer has 260 tokens, its context is CONTEXT
# Fields of a chat beside its messages, or these; then fields of other bodies.
CHAT_FIELDS: list[tuple[str, list[Any]]] = [
    ("messages", [None, [], "hi", [{"role": "tool", "content": "x"}], [{"role": "user", "content": "x" * 600}]]),
    ("max_tokens", [-1, "5", 1.5]),
    ("max_completion_tokens", [-1]),
    ("temperature", [-0.1, "hot"]),
    ("top_p", [0, 1.1]),
    ("top_k", [0]),
    *(("min_p", [-1]), ("frequency_penalty", [3]), ("presence_penalty", [-3]), ("repetition_penalty", [0])),
    ("n", [0, 129, 10**12, True]),
    ("seed", [2**63, "x"]),
    ("stop", [["x"] * 33, "", "x" * 2000, ["x" * 10_000_000]]),
    ("stop_regex", ["(", ["a", "a*"], "(?=a)", ["a"] * 9, "a" * 10_000_000, 5]),
    ("no_stop_trim", ["yes"]),
    ("stop_token_ids", [[-1], [260]]),
    ("logit_bias", [{"5": 101}, {"999999": 1}, {"x": 1}]),
    *(("top_logprobs", [3]), ("logprobs", [3]), ("stream", ["yes"]), ("stream_options", [{"include_usage": True}])),
    ("tools", [[TOOL, TOOL], [{"function": {"name": f"f{i}"}} for i in range(200)]]),
    *(("functions", [[{"name": "f"}]]), ("tool_choice", ["required"]), ("json_schema", [" "]), ("model", [5])),
    ("regex", [5, "a" * (256 * 1024 + 1)]),
    *(("modalities", [["audio"]]), ("custom_logit_processor", ["gASV"]), ("rid", ["x" * 300])),
    ("allowed_token_ids", [[], [-1], [260], "a"]),
    ("bad_words", [[""], [" "], ["x" * 8193], "a", ["a"] * 2049, [f"w{i}" for i in range(1500)]]),
    ("include_stop_str_in_output", ["yes"]),
    ("structured_outputs", [{}, {"json": None}, 5]),
    ("guided_choice", [[], [""], "a"]),
    ("guided_regex", ["", 5]),
    ("guided_json", [5, ""]),
    ("return_token_ids", ["yes"]),
    ("return_hidden_states", [True, "last", 5]),
    *(("chat_template", ["{{ 1 }}"]), ("documents", [[{"text": "x"}]]), ("echo", [True]), ("input_ids", [[1]])),
    ("prompt_logprobs", [0, 5]),
    ("truncate_prompt_tokens", [0, 5, -1]),
    ("length_penalty", [0, 1.5]),
    ("use_beam_search", [True]),
    ("session_params", [{"id": "s"}]),
    ("session_id", ["s" * 1025, {}, ["s"], 0.5, True]),
    ("prompt_cache_key", [5, "k" * 1025]),
    ("expected_return_s", [-1, "soon", 86_401, 1e300]),
    ("returns_within_s", [-0.5, {}, 1e9]),
    ("cache_salt", [5, "s" * 1025, ["a", "b"], {}]),
    ("extra_key", [5, "k" * 10_000_000, [], [None, None]]),
]
PROMPTS: list[Any] = [
    *(None, "", [], ["a", ""], [[]], ["a", 1], ["a", [1]], [260], [-1], [10**30], {"a": 1}, [1] * CONTEXT)
]
WRONG_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {"messages": USER, "max_tokens": 2, field: value}, field) for field, values in CHAT_FIELDS
        for value in values),
    *((COMPLETE, {"prompt": prompt}, "prompt") for prompt in PROMPTS),
    *((RESPOND, {"input": "x", **more}, field) for field, more in WRONG),
    (RESPOND, {}, "input"),
    (CHAT, {"messages": USER, "structured_outputs": {"unheard": 1}}, "structured_outputs.unheard"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0].image_url"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": USER, "max_tokens": 600}, "messages"),
    (CHAT, {"messages": USER, "max_tokens": 10**30}, "messages"),
    (CHAT, {"messages": USER, "stop": [1]}, "stop[0]"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    (CHAT, {"messages": USER, "tools": [{"type": "magic", "function": {"name": "f"}}]}, "tools[0].type"),
    (CHAT, {"messages": USER, "tools": [{"function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    (CHAT, {"messages": USER, "tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
    (CHAT, {"messages": USER, "tools": [{"function": {}}]}, "tools[0].function.name"),
    (CHAT, {"messages": USER, "tools": [NO_PARAMETERS]}, "tools[0].function.parameters"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "required", "regex": "a"}, "regex"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": USER, "response_format": {}}, "response_format.type"),
    (CHAT, {"messages": USER, "response_format": BY_SCHEMA}, "response_format.json_schema.schema"),
    (CHAT, {"messages": USER, "response_format": {**BY_SCHEMA, "json_schema": 5}}, "response_format.json_schema"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    (CHAT, {"messages": USER, "json_schema": "{}", "ebnf": "start: a"}, "ebnf"),
    (CHAT, {"messages": USER, "regex": "a", "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"messages": USER, "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    (CHAT, {"messages": USER, "structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    (CHAT, {"messages": USER, "structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    (CHAT, {"messages": USER, "structured_outputs": _SPACED}, "structured_outputs.whitespace_pattern"),
    (COMPLETE, {}, "prompt"),
    (COMPLETE, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETE, {"prompt": ["a"] * 100, "n": 128}, "prompt"),
    (COMPLETE, {"prompt": "a", "max_tokens": CONTEXT}, "prompt"),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETE, {"prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETE, {"prompt": "a", "logprobs": 6}, "logprobs"),
    (COMPLETE, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (COMPLETE, {"prompt": "a", "echo": "yes"}, "echo"),
    (GENERATE, {}, "text"),
    (GENERATE, {"text": "a", "input_ids": [1]}, "text"),
    (GENERATE, {"text": ""}, "text"),
    (GENERATE, {"text": []}, "text"),
    (GENERATE, {"input_ids": []}, "input_ids"),
    (GENERATE, {"input_ids": [1, [2]]}, "input_ids"),
    (GENERATE, {"input_ids": [[1], []]}, "input_ids"),
    (GENERATE, {"input_ids": [99999]}, "input_ids"),
    (GENERATE, {"text": "a", "sampling_params": "greedy"}, "sampling_params"),
    (GENERATE, {"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
    (GENERATE, {"text": "a", "sampling_params": {"stop_regex": ["("]}}, "stop_regex"),
    (GENERATE, {"text": "a", "sampling_params": {"stop": ["x" * 10_000_000]}}, "stop"),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -5}}, "max_new_tokens"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": ""}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": "[" * 300_000}}, "sampling_params.json_schema"),
    (GENERATE, {"text": "a", "sampling_params": {"temperature": []}}, "sampling_params.temperature"),
    (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": 50}, "logprob_start_len"),
    (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": 10**9}, "top_logprobs_num"),
    (GENERATE, {"text": ["a", "b"], "rid": ["same", "same"]}, "rid"),
    (GENERATE, {"text": ["a", "b"], "rid": ["one"]}, "rid"),
    (GENERATE, {"text": "a", "rid": ""}, "rid"),
    (GENERATE, {"text": "a", "image_data": "x"}, "image_data"),
    (GENERATE, {"text": "a", "lora_path": "x"}, "lora_path"),
    (GENERATE, {"text": "a", "return_hidden_states": True}, "return_hidden_states"),
    (GENERATE, {"text": "a", "return_logprob": True, "token_ids_logprob": [10**9]}, "token_ids_logprob"),
    ("/abort_request", {}, "rid"),
    ("/abort_request", {"rid": 5}, "rid"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ("/v1/chat/completions/render", {"messages": []}, "messages"),
    ("/v1/completions/render", {"prompt": "a", "temperature": -1}, "temperature"),
]  # fmt: skip

# ---- for the shipped model, through a router: what differs there, and fields that only /generate has

IDS = {"input_ids": [1, 20, 280, 20]}
NAN, INF = "NaN", "Infinity"
HUGE = 10**40

SAMPLING: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.5, -1e-9, "hot", [], {}, True, 1e400]),
    ("top_p", [0, -0.1, 1.0001, 1e300, "1"]),
    ("top_k", [0, -2, 1.5, "5", HUGE]),
    ("min_p", [-0.1, 1.1]),
    ("frequency_penalty", [2.1, -2.1, "x"]),
    ("presence_penalty", [2.1, -1e300]),
    ("repetition_penalty", [0, -1, 2.5]),
    ("max_new_tokens", [-1, -HUGE, 1.5, "5", 10**9, 10**18, True]),
    ("min_new_tokens", [-1, -HUGE, "x"]),
    ("n", [0, -1, 129, 4096, 10**12, HUGE, 1.5, True]),
    ("sampling_seed", [2**63, -(2**63) - 1, HUGE, "x", 0.5]),
    ("stop", ["", "x" * 10_000_000, ["x" * 1000] * 10_000, [["x"]]]),
    ("stop_token_ids", [[-1], [528], [HUGE], 5]),
    ("logit_bias", [{"20": 101}, {"20": 1e300}, {"528": 1}, {"-1": 1}, {"k17": 1}, [1]]),
    ("regex", ["(", "[a-", "", 5]),
    ("ebnf", ["start: nowhere", "root ::= ("]),
    ("json_schema", ["{", '{"type": "nothing"}', '{"$ref": "#/nowhere"}', "[" * 5000]),
    ("structural_tag", ["{}"]),
    ("ignore_eos", ["yes"]),
    ("skip_special_tokens", [1]),
    ("stream_interval", [0, -5]),
    ("allowed_token_ids", [[], [-1], [528], [HUGE], 5]),
    ("bad_words", [[""], [" "], ["x" * 8193], 5]),
    ("temprature", [1]),
    ("custom_params", [{"a": 1}]),
    ("beam_width", [2]),
    ("spaces_between_special_tokens", ["no"]),
]
NATIVE: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [1.5]}, "input_ids"),
    ({"input_ids": [HUGE]}, "input_ids"),
    *(({**IDS, "sampling_params": wrong}, "sampling_params") for wrong in ([], [1, 2])),
    ({"input_ids": [[1], [1]], "sampling_params": [{}]}, "sampling_params"),
    ({"input_ids": [[1], [1]], "sampling_params": [{"temperature": 1}, {"temperature": -1}]}, "temperature"),
    ({"input_ids": [[1], [1], [1]], "sampling_params": [{}, {"regex": "("}, {}]}, "regex"),
    ({**IDS, "lora_path": "one"}, "lora_path"),
    ({**IDS, "rid": {"$ne": 1}}, "rid"),
    *(({**IDS, name: value}, name) for name in ("cache_salt", "extra_key")
        for value in ("s" * 1025, ["a", "b"], 7, [[]])),
    *(({**IDS, "priority": priority}, "priority") for priority in (2**31, -HUGE, "high", 0.5)),
    ({"input_ids": [[1], [1]], "return_logprob": True, "logprob_start_len": [0]}, "logprob_start_len"),
    ({"input_ids": [[1], [1]], "return_logprob": [True]}, "return_logprob"),
    ({**IDS, "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    *(({**IDS, "return_logprob": True, "token_ids_logprob": ids}, "token_ids_logprob")
        for ids in ([528], [-1], [1] * 1000, [16, [17]], [[16], [17]])),
    ({**IDS, "stream": True, "sampling_params": {"regex": "("}}, "regex"),
    ({**IDS, "stream": "yes"}, "stream"),
    ({"input_ids": [20] * 40_000}, "max_new_tokens"),
]  # fmt: skip
CHATS: list[tuple[str, list[Any]]] = [
    ("response_format", ["json", {"type": "structural_tag", "structures": [], "triggers": []},
     *({**BY_SCHEMA, "json_schema": {"schema": bad}} for bad in ({"type": 5}, []))]),
    ("tools", [{}, [5], [{"type": "function"}], [{"function": {"name": "f", "parameters": 5}}]]),
    ("messages", [[{"role": "user", "content": [{"type": "video"}]}], [{"role": "system"}]]),
]  # fmt: skip
EMBEDDINGS: list[tuple[str, dict[str, Any]]] = [
    *(("input", {"input": given}) for given in ("", [], ["a", [1]], [600])),
    ("encoding_format", {"input": "a", "encoding_format": "int8"}),
    ("dimensions", {"input": "a", "dimensions": "8"}),
    *(("dimensions", {"input": "a", "dimensions": size}) for size in (0, -1, 100_000)),
    ("cache_salt", {"input": "a", "cache_salt": ["s", "t"]}),
]
ENCODED: list[tuple[str, dict[str, Any]]] = [
    *(("text", {"text": given}) for given in ("", [], [""], 5)),
    *(("input_ids", {"input_ids": given}) for given in ([], [[]], [[1], 2], [-1], [600])),
    *(("text", body) for body in ({}, {"text": "a", "input_ids": [1]})),
    ("image_data", {"text": "a", "image_data": "x"}),
]
PAIR = {"query": "a", "items": ["b"], "label_token_ids": [5]}
SCORED: list[tuple[str, dict[str, Any]]] = [
    *((field, {**PAIR, field: None}) for field in PAIR),
    *(("label_token_ids", {**PAIR, "label_token_ids": given}) for given in ([], [-1], [600], [HUGE], [5] * 1025, "a")),
    *(("items", {**PAIR, "items": given}) for given in ("", [], [""], [[1]], ["a", [1]], {}, ["b"] * 5000)),
    *(("items", {**PAIR, "query": [7], "items": given}) for given in (["a"], [600], [[]])),
    *(("items", {**PAIR, "items": given}) for given in (["k17 " * 40_000],)),
    ("apply_softmax", {**PAIR, "apply_softmax": "yes"}),
    ("priority", {**PAIR, "priority": HUGE}),
    ("documents", {"query": "a", "documents": ["b"]}),
    ("text_1", {"text_1": "a", "text_2": "b"}),
]
DOCUMENTS = {"query": "a", "documents": ["b", {"text": "c"}]}
RERANKED: list[tuple[str, dict[str, Any]]] = [
    *((field, {**DOCUMENTS, field: given}) for field in DOCUMENTS for given in (None, 5)),
    *(("documents", {**DOCUMENTS, "documents": given}) for given in ([], [5], [{}])),
    *(("top_n", {**DOCUMENTS, "top_n": given}) for given in (0, "1")),
    ("max_tokens_per_doc", {**DOCUMENTS, "max_tokens_per_doc": 5}),
]
TEXTS = {"text_1": "a", "text_2": ["b", "c"]}
PAIRED: list[tuple[str, dict[str, Any]]] = [
    *((field, {**TEXTS, field: given}) for field in TEXTS for given in (None, [5])),
    ("text_1", {**TEXTS, "text_1": ["a", "b", "c"]}),
    ("text_2", {**TEXTS, "text_2": []}),
    ("label_token_ids", {**TEXTS, "label_token_ids": [5]}),
]
CLASSIFIED: list[tuple[str, dict[str, Any]]] = [("input", {"input": 5}), ("text", {"text": "a"})]
_OTHER_APIS = {
    **{table.EMBED: EMBEDDINGS, table.ENCODE: ENCODED, table.SCORE: SCORED, table.RERANK: RERANKED},
    **{table.SCORE_PAIRS: PAIRED, table.CLASSIFY: CLASSIFIED},
}
DEEP_SCHEMA = b'{"text": "k17", "sampling_params": {"json_schema": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}}"
RAW: list[tuple[str, bytes, str]] = [
    (GENERATE, b'{"text": "k17", "sampling_params": {"temperature": -Infinity}}', ""),
    (GENERATE, DEEP_SCHEMA, ""),
]


def wrong_values() -> list[tuple[str, bytes, str]]:
    """(path, body, the field that the error names; "" where the body is no JSON that could name one)."""
    native = [({**IDS, "sampling_params": {field: value}}, field) for field, values in SAMPLING for value in values]
    bodies = [(GENERATE, body, field) for body, field in [*native, *NATIVE]]
    bodies += [(CHAT, {**table.USER, field: value}, field) for field, values in CHATS for value in values]
    bodies += [(path, body, field) for path, rows in _OTHER_APIS.items() for field, body in rows]
    bodies.append((CHAT, {**table.USER, "tools": [TOOL], "tool_choice": 5}, "tool_choice"))
    no_schema = {"function": {"name": "f", "parameters": {"type": 5}}}
    bodies += [
        (CHAT, {**table.USER, "tools": [no_schema], "tool_choice": "required", "stream": stream}, "tools")
        for stream in (False, True)
    ]
    return [(path, json.dumps(body).replace(INF, "1e400").encode(), field) for path, body, field in bodies] + RAW
