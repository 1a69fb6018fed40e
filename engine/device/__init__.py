"""What an engine has on its device, and how the memory there is measured and shared out."""
