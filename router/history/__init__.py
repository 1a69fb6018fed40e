"""The last requests and the last two minutes by second, for the dashboard."""
