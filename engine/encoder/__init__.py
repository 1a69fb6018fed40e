"""The engine of an encoder worker: a vision tower, and its features by the page (EPD disaggregation)."""
