"""Who the workers are: the table, their health and load, legs that wait for them, service discovery."""
