"""The engine of an encoder worker (EPD disaggregation)."""
