"""Token ids to text, while they come."""
