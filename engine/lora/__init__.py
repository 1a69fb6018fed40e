"""LoRA adapters: reading PEFT directories, holding their weights, and adding what they change to the layers' results."""
