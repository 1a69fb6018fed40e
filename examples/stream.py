"""Print an answer while it is made: `python examples/stream.py`."""

import asyncio

from tandem import AsyncLLM


async def main() -> None:
    question = {"role": "user", "content": "Name three colors."}
    async with AsyncLLM("smollm2") as llm:
        async for output in llm.chat([question], max_tokens=64, temperature=0):
            print(output.delta, end="\n" if output.finish_reason else "", flush=True)


asyncio.run(main())
