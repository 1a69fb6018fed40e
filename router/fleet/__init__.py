"""Several processes that form one router."""
