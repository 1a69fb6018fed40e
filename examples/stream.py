"""Print an answer while it is made: `python examples/stream.py`."""

import asyncio

from tandem import AsyncLLM


async def main() -> None:
    async with AsyncLLM("smollm2") as llm:
        async for output in llm.generate("Once upon a time", max_tokens=32, temperature=0):
            print(output.delta, end="", flush=True)
        print()


asyncio.run(main())
