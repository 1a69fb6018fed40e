"""LoRA adapters: PEFT directories, what a step adds, and the control of loads."""
