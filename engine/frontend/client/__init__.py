"""The engine as the HTTP side sees it: samples sent, text received."""
