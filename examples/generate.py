"""Continue several prompts, without a server: `python examples/generate.py`."""

from tandem import LLM, SamplingParams

llm = LLM("smollm2")
prompts = ["The capital of France is", "The opposite of hot is", "1, 2, 3, 4,"]
for output in llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, stop="\n")):
    print(f"{output.prompt}{output.text}   [{output.finish_reason}, {len(output.token_ids)} tokens]")
