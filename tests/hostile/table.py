"""Hostile input as data: headers, request targets, bodies, bytes that are no HTTP, and frames. `test_every_door.py` plays it."""

import gzip
import json
import random
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

JSON = b"application/json"
GENERATE, COMPLETE, CHAT, EMBED = "/generate", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
RESPOND, MESSAGES = "/v1/responses", "/v1/messages"
ENCODE, SCORE = "/encode", "/v1/score"
RERANK, SCORE_PAIRS, CLASSIFY = "/v1/rerank", "/score", "/classify"
PAIRS = (RERANK, "/rerank", "/v2/rerank", SCORE_PAIRS, CLASSIFY, "/v1/classify")
GENERATION = (GENERATE, COMPLETE, CHAT, EMBED, ENCODE, SCORE, *PAIRS, RESPOND, MESSAGES, "/api/chat", "/api/generate")
PROMPT = {"text": "k17 v42 k17"}
USER = {"messages": [{"role": "user", "content": "k17"}]}


@dataclass(frozen=True)
class Call:
    """One HTTP request, to the byte. `target`: path and query as they are sent."""

    method: bytes
    target: bytes
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def head(self, host: bytes) -> bytes:
        """Head and body; a header of this call replaces the one that would be sent otherwise."""
        lines = {b"Host": host}
        if self.body:
            lines |= {b"Content-Type": JSON, b"Content-Length": b"%d" % len(self.body)}
        for name, value in self.headers:
            lines = {known: kept for known, kept in lines.items() if known.lower() != name.lower()} | {name: value}
        sent = b"".join(name + b": " + value + b"\r\n" for name, value in lines.items())
        return self.method + b" " + self.target + b" HTTP/1.1\r\n" + sent + b"\r\n" + self.body


def post(path: str, body: bytes | dict[str, Any], *headers: tuple[bytes, bytes]) -> Call:
    return Call(b"POST", path.encode(), body if isinstance(body, bytes) else json.dumps(body).encode(), headers)


# ---- headers: every one that some server here reads, and some that proxies and browsers add

# Those that refuse nothing are sent together; one that may refuse a request is sent alone, else it would hide the others.
HEADERS: tuple[tuple[str, ...], ...] = (
    (*("X-Request-Id", "X-Tandem-Sibling", "X-Cluster-Auth", "X-Cluster-Challenge", "X-Cluster-Voucher"),
     *("Authorization", "x-api-key", "traceparent", "tracestate", "X-Session-Id", "X-SMG-Routing-Key", "Expect"),
     *("Accept", "Accept-Encoding", "Referer", "Cookie", "User-Agent", "Range", "Forwarded", "If-None-Match"),
     *("X-Forwarded-For", "X-Forwarded-Host")),
    *((name,) for name in ("x-request-timeout", "x-envoy-expected-rq-timeout-ms", "x-priority", "x-slo-ttft-ms")),
    *((name,) for name in ("x-slo-itl-ms", "Host", "Origin", "Sec-Fetch-Site")),
    # of routers to workers
    ("X-Tandem-Frames", "X-Tandem-Keep", "X-Tandem-Prefix-Source", "X-Tandem-Image-Encoders", "X-Tandem-No-Beats"),
    *((name,) for name in ("X-Tandem-Resume", "x-data-parallel-rank", "Last-Event-ID")),
    *((name,) for name in ("Content-Type", "Content-Encoding", "Content-Length", "Transfer-Encoding", "Connection",
        "Upgrade")),
)  # fmt: skip
HEADER_VALUES: dict[str, bytes] = {
    "empty": b"",
    "not-utf-8": b"\xff\xfe",
    "surrogate": b"\xed\xa0\x80",
    "utf-8": "schl\u00fcssel\U0001f511".encode(),
    "bearer-not-utf-8": b"Bearer \xff",
    "not-a-number": b"nan",
    "infinite": b"inf",
    "negative": b"-1",
    "overflow": b"1e400",
    "digits": b"9" * 5000,
    "long": b"a" * 7000,
    "markup": b"<script>alert(1)</script>",
    "escapes": b"%s%n%00%0d%0a\\ud800",
    "colons": b"::::a:b:c",
}

# What a router says to workers, as anyone may write it: path and body, with the header that would sign it.
RESUME = {
    **{"id": "c", "created": 1, "names": ["c"], "groups": ["c"], "seeds": [3], "salt": "s"},
    **{"output_ids": [[99_999_999]], "ended": [None], "logprobs": [[]], "prompt_logprobs": [[]]},
}
ROUTERS_WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "resume": (GENERATE, {**PROMPT, "resume": RESUME}),
    "resume-completion": (COMPLETE, {"prompt": "k17", "resume": RESUME}),
    "resume-chat": (CHAT, {**USER, "resume": RESUME}),
    "kept": ("/kept_stream", {"request_id": "r", "owner": "o", "body": "b", "after": "0123456789abcdef-1"}),
    "move": ("/move_out", {"samples": [{"rid": "x", "room": 1}]}),
}
SIGNATURES = (b"-", b"x", b"0" * 64)

BYTES_IN_HEADERS = ("not-utf-8", "surrogate", "long")

# ---- request targets; the first word of a path is one that is served

TARGETS: dict[str, bytes] = {
    "byte": b"/\xff",
    "model-byte": b"/v1/models/\xff",
    "model-surrogate": b"/v1/models/%ED%A0%80",
    "model-nul": b"/v1/models/%00",
    "model-markup": b"/v1/models/%3Cscript%3E",
    "model-break": b"/v1/models/a%0d%0aX-Injected:%20b",
    "request-byte": b"/dashboard/requests/\xff",
    "request-surrogate": b"/dashboard/requests/%ed%b0%80",
    "trace-byte": b"/traces/\xff",
    "trace-surrogate": b"/traces/%ed%b0%80",
    "query-byte": b"/health_x?a=\xff",
    "room-byte": b"/route?room=\xff",
    "room-surrogate": b"/route?room=%ED%A0%80",
    "but-byte": b"/route?room=0&any=1&but=\xff,\xed\xa0\x80",
    "up": b"/../../etc/passwd",
    "model-up": b"/v1/models/%2e%2e/..%2f..\\nowhere",
    "response-up": b"/v1/responses/..%2f../%5c../nowhere",
    "trace-up": b"/traces//.//..%5C..%2Fnowhere",
    "request-up": b"/dashboard/requests/../../%2e%2e%2fnowhere",
    "twice-escaped": b"/v1/models/%252e%252e%252f%252e%252e%252fflush_cache",
    "slashes": b"/" * 4000 + b"nowhere",
    "half-escape": b"/v1/models/%f",
    "absolute": b"http://127.0.0.1:1/v1/nowhere",
    "long": b"/" + b"a" * 5000,
}
METHODS = (b"DELETE", b"PATCH", b"TRACE", b"CONNECT", b"PROPFIND", b"post", b"F\xff")

# ---- bodies that no route takes as a request

RAW_BODIES: dict[str, bytes] = {
    "half-an-object": b'{"messages": [',
    "truncated-string": b'{"text": "k1',
    "list": b"[]",
    "null": b"null",
    "number": b"7",
    "text": b'"text"',
    "two-values": b'{"text": "a"} {"text": "b"}',
    "comma": b'{"text": "a", }',
    "nan": b'{"text": "k17", "url": NaN, "sampling_params": {"temperature": NaN}}',
    "not-utf-8": b'{"text": "\xff\xfe\xc3(", "url": "\xff"}',
    "utf-8-surrogate": b'{"text": "\xed\xa0\x80", "url": "\xed\xa0\x80"}',
    "key-not-utf-8": b'{"\xff": 1}',
    "nul-bytes": b"\x00" * 4096,
    "deep-lists": b'{"text": "k17", "x": ' + b"[" * 200_000,
    "deep-and-whole": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep-objects": b'{"messages": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "form": b"text=k17&n=2",
    "pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}
# A body that says nothing wrong, in a wrong wrapping. The last: what it unpacks to is no JSON.
WRAPPINGS: dict[str, tuple[tuple[bytes, bytes], bytes]] = {
    "plain-text": ((b"Content-Type", b"text/plain"), b'{"url": "http://127.0.0.1:9"}'),
    "form": ((b"Content-Type", b"application/x-www-form-urlencoded"), b'{"url": "http://127.0.0.1:9"}'),
    "multipart": ((b"Content-Type", b"multipart/form-data; boundary=x"), b"--x\r\n\r\n{}\r\n--x--"),
    "json-beside": ((b"Content-Type", b"text/plain; application/json"), b"{}"),
    "no-type": ((b"Content-Type", b""), b"{}"),
    "no-gzip": ((b"Content-Encoding", b"gzip"), b"abcd"),
    "brotli": ((b"Content-Encoding", b"br"), b"\x0b\x00\x80{}\x03"),
    "gzip-twice": ((b"Content-Encoding", b"gzip, gzip"), gzip.compress(gzip.compress(b"{}"))),
    "deflate": ((b"Content-Encoding", b"deflate"), b"\xff\xff"),
}


@cache
def too_much() -> dict[str, tuple[tuple[tuple[bytes, bytes], ...], bytes]]:
    """Headers and bodies: right JSON that holds too much, some of it in few bytes."""
    text = b'{"text": "' + b"k17 " * 11_000_000 + b'"}'
    gzipped, deflated = (((b"Content-Encoding", name),) for name in (b"gzip", b"deflate"))
    return {
        "bomb": (gzipped, gzip.compress(b" " * (65 << 20), 1)),
        "bomb-within-the-limit": (gzipped, gzip.compress(text)),
        "deflated-bomb": (deflated, zlib.compress(text)),
        "many-members": (gzipped, gzip.compress(b" " * (1 << 18)) * 500),
        "lists": ((), b'{"text": "k17", "x": [' + b"[]," * 400_000 + b"1]}"),
        "names": ((), b'{"text": "k17", "x": {' + b'"":1,' * 300_000 + b'"a": 1}}'),
        "messages": ((), b'{"messages": [' + b'{"role": "user", "content": "k17"},' * 200_000 + b"{}]}"),
        "ids": ((), b'{"input_ids": [' + b"1," * 3_000_000 + b"1]}"),
    }


# A lone surrogate, as JSON can write it, wherever a client may put text.
LONE = "\ud800"
SURROGATES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (GENERATE, {"text": LONE}),
    "rid": (GENERATE, {**PROMPT, "rid": LONE}),
    "stop": (GENERATE, {**PROMPT, "sampling_params": {"stop": [LONE]}}),
    "stop-regex": (GENERATE, {**PROMPT, "sampling_params": {"stop_regex": LONE}}),
    "json-schema": (GENERATE, {**PROMPT, "sampling_params": {"json_schema": LONE}}),
    "sampling-count": (GENERATE, {**PROMPT, "sampling_params": {"n": LONE}}),
    "sampling-list": (GENERATE, {**PROMPT, "sampling_params": [{"max_new_tokens": LONE}]}),
    "ids": (GENERATE, {"input_ids": [LONE]}),
    "logprob-start": (GENERATE, {**PROMPT, "return_logprob": True, "logprob_start_len": [LONE]}),
    "adapter": (GENERATE, {**PROMPT, "lora_path": LONE}),
    "pair-key": (GENERATE, {**PROMPT, "bootstrap_host": LONE, "bootstrap_pair_key": LONE}),
    "session": (GENERATE, {**PROMPT, "session_params": {"id": LONE}}),
    "session-id": (GENERATE, {**PROMPT, "session_id": LONE}),
    "priority": (GENERATE, {**PROMPT, "priority": LONE}),
    "unknown-field": (GENERATE, {**PROMPT, "x": LONE}),
    "unknown-name": (GENERATE, {**PROMPT, LONE: 1}),
    "model": (COMPLETE, {"prompt": "a", "model": LONE}),
    "suffix": (COMPLETE, {"prompt": "a", "suffix": LONE}),
    "user": (CHAT, {**USER, "user": LONE}),
    "role": (CHAT, {"messages": [{"role": LONE, "content": "a"}]}),
    "tool": (CHAT, {**USER, "tools": [{"type": "function", "function": {"name": LONE}}]}),
    "tool-choice": (CHAT, {**USER, "tool_choice": {"type": "function", "function": {"name": LONE}}}),
    "input": (EMBED, {"input": LONE}),
    "response": (RESPOND, {"input": LONE}),
    "previous": (RESPOND, {"input": "a", "previous_response_id": LONE}),
    "reference": (RESPOND, {"input": [{"type": "item_reference", "id": LONE}]}),
    "metadata": (RESPOND, {"input": "a", "metadata": {LONE: LONE}}),
    "message": (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": LONE}]}]}),
    "option": ("/api/generate", {"model": "m", "prompt": "a", "options": {LONE: 1}}),
    "called": ("/api/chat", {"model": LONE, "messages": []}),
    "bias": (CHAT, {**USER, "logit_bias": {LONE: 1}}),
}


def with_bytes(fields: dict[str, Any]) -> bytes:
    """The same body with bytes that are no UTF-8 in that place."""
    return json.dumps(fields).encode().replace(rb"\ud800", b"\xff")


# Right JSON, wrong values: (path, fields). Those whose error names the field: wrong_fields.py.
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "text-is-a-number": (GENERATE, {"text": 5}),
    "too-long": (GENERATE, {"input_ids": [20] * 40_000}),
    "too-many-prompts": (GENERATE, {"input_ids": [[20]] * 5000}),
    "many-stops": (COMPLETE, {"prompt": "k17", "stop": ["x"] * 100_000}),
}
# The same name twice: JSON does not forbid it. The last one counts, everywhere alike.
TWICE = b'{"text": "k17 v42 k17", "text": 5}'

# ---- bytes that are no HTTP, or the beginning of some

_POST = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BYTES: dict[str, bytes] = {
    "http2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "tls-hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "noise": random.Random(0).randbytes(5000),
    "no-host-no-version": b"GET\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "negative-length": _POST + b"Content-Length: -5\r\n\r\n",
    "length-and-chunks": _POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "cut-off-body": _POST + b'Content-Length: 500\r\n\r\n{"text": "k1',
    "cut-off-chunks": _POST + b'Transfer-Encoding: chunked\r\n\r\nff\r\n{"text": "k1',
    "wrong-chunk": _POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "long-header": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "many-headers": b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(100_000)) + b"\r\n",
    "brotli": _POST + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\nx",
    "claimed-terabyte": _POST + b"Content-Length: 1099511627776\r\n\r\n{}",
}

# ---- ZMQ: bytes for a TCP port, and frames for a socket that speaks it

GREETING = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48
TCP_JUNK: dict[str, bytes] = {
    "noise": random.Random(1).randbytes(10_000),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": b"\x00" * 10_000,
    "greeting-and-noise": GREETING + random.Random(2).randbytes(10_000),
    "greeting-and-huge-frame": GREETING + b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
    "half-a-greeting": GREETING[:20],
}
FRAMES: dict[str, list[bytes]] = {
    "empty": [b""],
    "noise": [random.Random(3).randbytes(1000)],
    "reserved-code": [b"\xc1"],
    "nil": [msgspec.msgpack.encode(None)],
    "map": [msgspec.msgpack.encode({"type": "Register"})],
    "unknown-tag": [msgspec.msgpack.encode(["Explode", "a", "b"])],
    "too-few-fields": [msgspec.msgpack.encode(["Register", "a", "b"])],
    "wrong-types": [msgspec.msgpack.encode(["Ping", 1, 2, "x"])],
    "too-many-fields": [msgspec.msgpack.encode(["Ping", "a", "b", 1, 2])],
    "deep": [b"\x91" * 100_000],
    "false-length": [b"\xdd\xff\xff\xff\xff"],
    "name-not-utf-8": [b"\x93\xa4Ping\xa1\xff\xa1b\x01"],
    "many-parts": [b"a", b"b", b"c"],
}
FRAME_OVER_THE_LIMIT = b"x" * (9 << 20)

# ---- rooms, meeting places and peers of a decode or prefill worker

ROOMS: dict[str, Any] = {
    "missing": None,
    "zero": 0,
    "negative": -1,
    "too-large": 2**63,
    "far-too-large": 10**40,
    "string": "5",
    "float": 1.5,
    "object": {},
    "true": True,
    "list-of-wrong-length": [1, 2, 3],
    "list-of-strings": ["1"],
}
PLACES: list[tuple[str, Any]] = [
    *(("bootstrap_port", port) for port in (0, -1, 70_000, 10**40, "5", 1.5, [], {"a": 1})),
    *(("bootstrap_host", host) for host in (0, -1, [], ["a", "b"], {"a": 1})),
]
DEAD = ("127.0.0.1", "no-such-host.invalid", "x" * 5000, "a b\r\nc", "::1", "", "%00")
LIES: dict[str, tuple[int, bytes]] = {
    "junk": (200, b"\x00\xff junk"),
    "empty": (200, b""),
    "wrong-shape": (200, b'{"worker": 5, "shared": "maybe"}'),
    "deep": (200, b"[" * 100_000),
    "huge": (200, b'"' + b"x" * 30_000_000 + b'"'),
    "redirect": (302, b""),
    "teapot": (418, b'{"error": "short and stout"}'),
    "broken": (500, b"<html>"),
}
REPLIES = {  # and what the answer says
    "silence": "",
    "junk": "",
    "refusal": "not with you",
    "stranger": "",
    "success-at-once": "",
    "odd-rows": "metadata row of 4287 bytes, not 4288",
    "row-of-no-room": "metadata row says room 0",
}
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 99}, "version"),
    "signature": ({"signature": "another model"}, "another model"),
    "page-size": ({"page_size": 64}, "page_size"),
    "dtype": ({"dtype": "float64"}, "float64"),
    "backend": ({"backend": "mooncake"}, "mooncake"),
    "incarnation": ({"dst": "an earlier life"}, "restarted"),
    "checksum": (
        {"kv_checksum": "off"},
        "'off'; start both workers with --no-disaggregation-kv-checksum, or both without",
    ),
    "bytes": ({"layer_bytes": (1, 1)}, "bytes of layer 0 in a unit of a page differs: prefill has"),
    "layers": ({"layer_bytes": (1,) * 4096}, "num_layers differs: prefill has 2, decode has 4096"),
    "units": ({"kv_units": 3}, "kv_units differs: prefill has 1, decode has 3; give both workers one --kv-units"),
}
