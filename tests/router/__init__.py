"""Tests of router/: the pure parts with literals, the app against dummy workers over real sockets."""
