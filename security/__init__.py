"""Who may do what: keys, signatures, addresses, limits. A leaf: knows no server, no engine, no request's fields."""
