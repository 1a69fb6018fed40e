"""Prefill and decode in separate processes, behind one OpenAI API: `python examples/cluster.py`."""

from tandem import Cluster

with Cluster("smollm2", prefill=1, decode=1) as cluster:
    print(f"chat with it at {cluster.url}/chat")
    chat = cluster.openai().chat.completions
    question = {"role": "user", "content": "What is the capital of France?"}
    for chunk in chat.create(model="smollm2", messages=[question], max_tokens=32, temperature=0, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
