"""Prefill and decode in separate processes, behind one OpenAI API: `python examples/cluster.py`."""

from tandem import Cluster

with Cluster("smollm2", prefill=1, decode=1) as cluster:
    print(f"chat with it at {cluster.url}/chat")
    question = {"role": "user", "content": "What is the capital of France?"}
    client = cluster.openai()
    for chunk in client.chat.completions.create(model="smollm2", messages=[question], temperature=0, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
