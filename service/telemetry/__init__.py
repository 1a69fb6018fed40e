"""What processes report about requests: log lines, records of stages, spans."""
