"""Bodies of /v1/responses whose fields are wrong, and the field that the error must name; for `wrong_fields.py`."""

from typing import Any

TOOL: dict[str, Any] = {"type": "function", "name": "add"}
CALL_OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c", "output": "1"}
# (the field to name, fields beside a good input)
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("input", {"input": 5}),
    ("input[0].role", {"input": [{"content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    ("input[0].content[0].image_url", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input[0].type", {"input": [{"type": "web_search_call"}]}),
    ("input", {"input": [CALL_OUTPUT]}),
    ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_0_0"}]}),
    ("tools", {"tools": [TOOL, TOOL]}),
    ("input[0].arguments", {"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tools[0].name", {"tools": [{"type": "function", "name": "no space"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice.type", {"tool_choice": {"type": "file_search"}}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "f"}}),
    ("tool_choice.mode", {"tool_choice": {"type": "allowed_tools", "mode": "x"}}),
    ("tool_choice.tools", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ("text.verbosity", {"text": {"verbosity": "loud"}}),
    ("include[0]", {"include": ["everything"]}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("truncation", {"truncation": "hard"}),
    ("reasoning.summary", {"reasoning": {"summary": "long"}}),
    ("metadata", {"metadata": {"k" * 65: "v"}}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("input", {"max_output_tokens": 100_000}),
    ("max_tokens", {"max_tokens": 5}),
    ("response_format", {"response_format": {"type": "text"}}),
    ("n", {"n": 2}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("return_token_ids", {"return_token_ids": True}),
    ("use_beam_search", {"use_beam_search": True}),
    ("previous_response_id", {"previous_response_id": 5}),
    ("previous_response_id", {"previous_response_id": "resp_x"}),
    ("temperature", {"temperature": -1}),
]  # fmt: skip
