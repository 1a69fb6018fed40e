"""Several processes that form one router, their shared memory and messages."""
