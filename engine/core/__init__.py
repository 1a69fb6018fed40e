"""Pure scheduler from events and time to plans and effects. No torch, I/O, threads or clocks."""
