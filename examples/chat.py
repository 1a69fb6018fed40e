"""Answer several conversations at once: `python examples/chat.py`."""

from tandem import LLM

QUESTIONS = ["What is the capital of France?", "What is 2 + 2?"]

with LLM("smollm2") as llm:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat(chats, max_tokens=32, temperature=0), strict=True):
        print(f"{question}\n  {output.text}")
