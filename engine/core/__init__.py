"""The pure scheduler: told events and the time, it returns plans and effects. No torch, I/O, threads or clocks."""
