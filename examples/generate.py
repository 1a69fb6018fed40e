"""Continue several prompts, without a server: `python examples/generate.py`."""

from tandem import LLM, SamplingParams

llm = LLM("smollm2")
prompts = ["The capital of France is", "Water boils at", "1, 2, 3, 4,"]
for output in llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0)):
    print(f"{output.prompt}{output.text}   [{output.finish_reason}, {len(output.token_ids)} tokens]")
