"""What the last requests and the last two minutes were, by the second. The dashboard shows it."""
