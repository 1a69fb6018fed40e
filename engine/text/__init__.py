"""Text and tokens, tool calls, reasoning, stops. No torch; most modules are pure."""
