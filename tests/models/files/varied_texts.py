"""Texts that take a tokenizer through its corners: scripts, marks, code, digits, runs of white space, special tokens."""

import random
from collections.abc import Sequence

_WORDS = """
    the of and The capital France isn't I'VE we'll THEY'D don't naïve coöperate straße ÎLE niño Ελλάδα Москва
    שלום مرحبا 你好世界 こんにちは カタカナ 한국어 สวัสดี हिन्दी தமிழ் 🙂 👩\u200d👩\u200d👧\u200d👦 🇫🇷 e\u0301 n\u0303o ﬁne ½ Ⅷ x²
    1,234.56 0x1F 3.14e-10 2026-11-22 ０１２ ٣٤٥ foo_bar camelCase HTTPServer __init__ a.b.c() [i+1] {'k': v} !=
    === -> => // /* */ <div> </s> $x #1 @me %d &amp; \\n
"""
WORDS = _WORDS.split()
SPACES = (
    *([" "] * 3),
    *("  ", "    ", "\t", "\t\t", "\n", "\n\n", "\r\n", " \n ", "\n    "),
    *"\u00a0\u3000\u2009\u200b",
)

CODE = (
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    'for (int i = 0; i < 10; i++) {\n\tprintf("%d\\n", i);\n}\n',
    "SELECT COUNT(*) FROM t WHERE a >= 100 AND b LIKE '%x%';",
    "#include <stdio.h>\r\n\r\nint main(void) { return 0; }\r\n",
)
RANGES = ((0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x2000, 0x2800))
RANGES += ((0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFB50), (0xFF00, 0xFFF0), (0x1F300, 0x1FAFF))


def varied_texts(count: int, *, special: Sequence[str], seed: int = 0) -> list[str]:
    """`count` texts, the same ones for the same arguments; `special` tokens stand in some of them."""
    rng = random.Random(seed)
    return [_text(rng, special) for _ in range(count)]


def _text(rng: random.Random, special: Sequence[str]) -> str:
    parts = []
    for _ in range(rng.randrange(1, 16)):
        match rng.randrange(8):
            case 0:
                parts.append("".join(chr(rng.randrange(*rng.choice(RANGES))) for _ in range(rng.randrange(1, 12))))
            case 1:
                parts.append(str(rng.randrange(10 ** rng.randrange(1, 12))))
            case 2:
                parts.append(rng.choice(CODE))
            case 3 if special:
                parts.append(rng.choice(special))
            case _:
                parts.append(rng.choice(WORDS))
        parts.append(rng.choice(SPACES) if rng.random() < 0.8 else "")
    return "".join(parts)
