"""Dynamic roles: workers move between prefill and decode; by whose order, when, and how."""
