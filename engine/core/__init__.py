"""The pure scheduler: it receives events and the time, and returns plans and effects. No torch, I/O, threads or clocks."""
