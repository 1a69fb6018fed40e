"""Find the text that is nearest to a question, by vectors: `python examples/search.py`."""

from tandem import LLM

TEXTS = ["Paris is the capital of France.", "Water boils at 100 degrees.", "Dogs bark at night."]
QUESTION = "Which city is the capital of France?"

with LLM("smollm2") as llm:
    question, *vectors = [output.embedding for output in llm.embed([QUESTION, *TEXTS])]
    nearness = [sum(a * b for a, b in zip(question, vector, strict=True)) for vector in vectors]
    print(TEXTS[nearness.index(max(nearness))])
