"""Device data of an engine, and measurement and division of device memory."""
